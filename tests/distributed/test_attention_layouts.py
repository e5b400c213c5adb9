"""Attention options give the same training under every layout."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from small_run import PLAIN, Curve, build_run, curve_of, small_config, step_results
from torch import Tensor

from megafp8.models.attention import CausalAttention

OPTIONS = {
    "offsets and windows": "--softmax-type learnable --window-size 6,0 --window-attn-skip-freq 2",
    "yarn in half of the layers": (
        "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 8 "
        "--no-rope-freq 2"
    ),
    "capped": "--attention-logit-softcapping 3 --output-logit-softcapping 2",
}
LOGITS = "--log-max-attention-logit"
LIMITED = "--window-size 6,0 --window-attn-skip-freq 2 --reset-attention-mask --eod-mask-loss"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {
    "tensor and pipeline": ("--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2", 4),
    "context": ("--context-parallel-size 2", 2),
}


def largest_logits(options: str, layout: str, world_size: int) -> list[float]:
    config = small_config("llama", f"{PLAIN} {options} {layout}", world_size)
    ranks = run_ranks(world_size, lambda: [each.metrics for each in step_results(build_run(config), 2)])
    assert all(rank == ranks[0] for rank in ranks)
    return [metrics["max_attention_logit"] for metrics in ranks[0]]


@pytest.mark.parametrize("options", [LOGITS, f"{LOGITS} {OPTIONS['capped']} {RECOMPUTED}", f"{LOGITS} {LIMITED}"])
def test_the_largest_logit_is_that_of_all_ranks_and_microbatches(options: str) -> None:
    """Measuring it changes nothing."""
    one = largest_logits(options, "", 1)
    for layout, world_size in (*LAYOUTS.values(), ("--micro-batch-size 1", 1)):
        assert largest_logits(options, layout, world_size) == pytest.approx(one, rel=1e-5)
    assert curve(options, "", 1) == curve(options.removeprefix(LOGITS), "", 1)


def test_the_largest_logit_is_that_of_keys_that_are_seen() -> None:
    """By the masks of attention itself."""

    def body() -> tuple[float, float, float]:
        run, seen, earlier = build_run(small_config("llama", f"{PLAIN} {LOGITS} {LIMITED}")), [], []

        def look(core_attention: CausalAttention, inputs: tuple[Tensor, ...]) -> None:
            query, key = (x.detach().double().permute(1, 2, 0, 3) for x in inputs[:2])
            key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            logits = query @ key.transpose(-1, -2) * core_attention.softmax_scale
            positions = torch.arange(logits.shape[-1])
            mask = core_attention.mask((positions, positions), len(logits), inputs[3])
            seen.append(float(logits.masked_fill(~mask, -torch.inf).max()))
            earlier.append(float(logits.tril().max()))

        for module in run.training_state.chunks[0].modules():
            if isinstance(module, CausalAttention):
                module.register_forward_pre_hook(look)
        (result,) = step_results(run, 1)
        return result.metrics["max_attention_logit"], max(seen), max(earlier)

    ((measured, seen, earlier),) = run_ranks(1, body)
    assert measured == pytest.approx(seen, rel=1e-5) and seen < 0.99 * earlier


def curve(options: str, layout: str, world_size: int) -> Curve:
    config = small_config("llama", f"{PLAIN} {options} {layout}", world_size)
    return run_ranks(world_size, lambda: curve_of(config, 3))[-1]


@pytest.mark.parametrize("name", OPTIONS)
def test_layouts(name: str) -> None:
    alone = curve(OPTIONS[name], "", 1)
    assert alone.losses != curve("", "", 1).losses
    for layout, world_size in LAYOUTS.values():
        split = curve(OPTIONS[name], layout, world_size)
        assert split.losses == pytest.approx(alone.losses, rel=1e-5)
        assert split.grad_norms == pytest.approx(alone.grad_norms, rel=1e-4)
