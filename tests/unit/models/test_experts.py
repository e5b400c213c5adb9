"""Experts of one rank: padding, experts without tokens, all tokens at one expert, under every recipe."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from ranks import run_ranks
from small_run import build_run, small_config, train

from megafp8.metrics.expert_load import layer_load
from megafp8.models.experts import PaddedExperts, padded_positions
from megafp8.training.run import Run

EXPERTS = (
    "--num-layers 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    "--bf16 --transformer-impl emulated"
)
RECIPES = {
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed",
    "rowwise": "--fp8-format e4m3 --fp8-recipe rowwise",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1 --fp4-recipe nvfp4",
    "quartet2": (
        "--fp4-format e2m1 --fp4-recipe quartet2 --hidden-size 128 --kv-channels 128 --ffn-hidden-size 384 "
        "--moe-ffn-hidden-size 128"
    ),
}
COUNTS = [[3, 0, 21, 8], [0, 0, 0, 40], [0, 0, 0, 0]]


def run_experts(flags: str) -> list[float]:
    """Losses of two steps, after the experts of a layer have computed extreme assignments."""
    run = build_run(small_config("llama", f"{EXPERTS} {flags}"))
    experts = next(m for m in run.training_state.chunks[0].modules() if isinstance(m, PaddedExperts)).eval()
    for counts in COUNTS:
        tokens = torch.randn(sum(counts), experts.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        probs = torch.rand(sum(counts), requires_grad=True)
        output, bias = experts(tokens, torch.tensor(counts), probs)
        assert bias is None and output.shape == tokens.shape
        parts = zip(tokens.split(counts), probs.split(counts), output.split(counts), experts.local_experts, strict=True)
        for rows, factors, found, expert in parts:
            if not len(rows):
                continue
            zeros = -len(rows) % experts.alignment
            inputs = torch.cat([rows, rows.new_zeros(zeros, rows.shape[1])])
            probs_of_rows = torch.cat([factors, factors.new_zeros(zeros)])
            assert torch.equal(expert(inputs, probs_of_rows)[0][: len(rows)], found), "it scales its own tokens"
        if "delayed" in flags:
            continue  # it waits for the backward passes of all layers
        output.float().sum().backward()
        assert tokens.grad.isfinite().all() and probs.grad.isfinite().all()
    experts.train()
    return losses_of_one_batch(run)


def losses_of_one_batch(run: Run) -> list[float]:
    """Losses of the same samples before and after an update (the first has rate 0): another batch may be harder."""
    first, _, last = (train(run, 1).losses[0] for _ in range(3))
    return [first, last]


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_compute_any_assignment(recipe: str) -> None:
    first, second = run_ranks(1, run_experts, RECIPES[recipe])[0]
    assert 4 < second < first < 7


def run_biased_experts() -> list[float]:
    """Losses of two steps, after the biases of experts were compared with none."""
    run = build_run(small_config("gpt2", EXPERTS))
    experts = next(m for m in run.training_state.chunks[0].modules() if isinstance(m, PaddedExperts))
    tokens, probs = torch.randn(6, 64, dtype=torch.bfloat16), torch.tensor([0.5, 1.0] * 3)
    outputs = []
    for value in (0.0, 2.0, 0.0):
        for expert in experts.local_experts:
            expert.linear_fc2.bias.data.fill_(value)
        outputs.append(experts(tokens, torch.tensor([1, 2, 0, 3]), probs)[0].float())
    torch.testing.assert_close(outputs[1] - outputs[0], 2 * probs[:, None].expand(6, 64), rtol=0.01, atol=0.01)
    return losses_of_one_batch(run)


def test_biases_of_experts_are_added() -> None:
    first, second = run_ranks(1, run_biased_experts)[0]
    assert 4 < second < first < 7


def train_one_expert() -> tuple[list[float], list[float]]:
    """Gradient norms of each expert's linear_fc1 with a router that sends all tokens to experts 0 and 1."""
    run = build_run(small_config("llama", f"{EXPERTS} {RECIPES['delayed']}"))
    layer = next(m for m in run.training_state.chunks[0].modules() if isinstance(m, MoELayer))
    original = layer.router.routing

    def routing(logits: torch.Tensor, padding_mask: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        shifted = logits + torch.tensor([50.0, 40.0, 0.0, 0.0])
        return original(shifted, padding_mask)

    layer.router.routing = routing
    losses = train(run, 2).losses
    return losses, [float(expert.linear_fc1.weight.main_grad.norm()) for expert in layer.experts.local_experts]


def test_experts_without_tokens_get_no_gradient() -> None:
    losses, norms = run_ranks(1, train_one_expert)[0]
    assert all(torch.isfinite(torch.tensor(losses)))
    assert norms[0] > 0 and norms[2] == norms[3] == 0


def test_rows_are_padded_behind_each_expert() -> None:
    positions = padded_positions([2, 0, 3], [16, 0, 16], torch.device("cpu"))
    assert positions.tolist() == [0, 1, 16, 17, 18]


def test_the_load_of_a_layer() -> None:
    load = layer_load([0, 6, 0, 6], topk=2, num_tokens=6, entropy_sum=0.0, num_remaining=9, bias=None, num_rows=36)
    assert (load.max_to_mean, load.variation, load.num_idle, load.busiest_expert) == (2.0, 1.0, 2, 1)
    assert (load.idle_experts, load.num_assignments, load.topk_fraction) == ((0, 2), 12, 1.0)
    assert load.padded_fraction == 0.75
    assert load.dropped_fraction == 0.25
