"""Runs with --optimizer muon: a plain version of the update, layouts with the same state, and skipped updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_run import (
    FP8,
    PLAIN,
    SourceSamples,
    build_run,
    fingerprint,
    small_config,
    statistics_record_of,
    train,
    weights,
)

from megafp8.checkpoint.progress import Progress
from megafp8.config.optimizers import polynomials
from megafp8.config.schema import RunConfig
from megafp8.optimizer.layer_wise import LayerWiseOptimizer
from megafp8.optimizer.schedules import current_learning_rate, current_loss_scale
from megafp8.training.evaluation import build_batches
from megafp8.training.extensions.replica_check import check_replicas
from megafp8.training.step import train_step

EXACT = "--muon-fp32-matmul-prec highest"
MUON = f"{PLAIN} --optimizer muon {EXACT} --muon-momentum 0.95 --muon-extra-scale-factor 0.2"
LAYER_WISE = "--use-distributed-optimizer"
# Layers that quantize, so without PLAIN.
FP8_WEIGHTS = f"--optimizer muon --fp8-param-gather {FP8}"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-token-dispatcher-type alltoall"
# The gradient norm of experts on ranks of their own is rounded apart, but not where all ranks sum one norm.
UNCLIPPED = "--micro-batch-size 2 --clip-grad 0"
STEPS = 4


def plain_orthogonal(matrix: torch.Tensor, config: RunConfig) -> torch.Tensor:
    x = matrix / matrix.norm()
    for a, b, c in polynomials(config.optimizer):
        square = x @ x.T
        x = a * x + b * square @ x + c * square @ square @ x
    return x * 0.2 * max(matrix.shape) ** 0.5


def plain_direction(name: str, matrix: torch.Tensor, config: RunConfig) -> torch.Tensor:
    """The update of a matrix in FP64. The rows of linear_qkv are, for each of two groups, 2 x 16, 16 and 16."""
    if "linear_qkv" not in name:
        return plain_orthogonal(matrix, config)
    rows = torch.arange(len(matrix))
    kind = {"llama": torch.tensor([0] * 32 + [1] * 16 + [2] * 16), "gpt2": torch.tensor([0] * 16 + [1] * 16 + [2] * 16)}
    style = "llama" if config.model.swiglu else "gpt2"
    kinds = kind[style].repeat(len(matrix) // len(kind[style]))
    update = torch.zeros_like(matrix)
    for each in range(3):
        update[rows[kinds == each]] = plain_orthogonal(matrix[kinds == each], config)
    return update


class PlainOptimizer:
    """Clipping, Muon and AdamW in FP64 on dictionaries of tensors."""

    def __init__(self, config: RunConfig, start: dict[str, torch.Tensor]):
        self.config = config
        self.weights = {name: weight.double() for name, weight in start.items()}
        self.first = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.step = 0

    def update(self, gradients: dict[str, torch.Tensor], rate: float) -> None:
        self.step += 1
        norm = sum(gradient.double().square().sum() for gradient in gradients.values()).sqrt()
        clip = min(1.0, 1.0 / (norm + 1e-6))
        for name, gradient in gradients.items():
            self.update_one(name, gradient.double() * clip, rate)

    def update_one(self, name: str, gradient: torch.Tensor, rate: float) -> None:
        weight = self.weights[name]
        if weight.ndim > 1:  # biases and norms have no decay
            weight -= rate * 0.1 * weight
        is_matrix = weight.ndim == 2 and "embedding" not in name and "output_layer" not in name
        beta = 0.95 if is_matrix else 0.9
        self.first[name] = beta * self.first[name] + (1 - beta) * gradient
        if is_matrix:
            weight -= rate * plain_direction(name, self.first[name], self.config)
            return
        self.second[name] = 0.95 * self.second[name] + 0.05 * gradient.square()
        mean, square = self.first[name] / (1 - 0.9**self.step), self.second[name] / (1 - 0.95**self.step)
        weight -= rate * mean / (square.sqrt() + 1e-8)


@pytest.mark.parametrize(
    ("style", "flags"), [("llama", ""), ("gpt2", ""), ("llama", f"{EXPERTS} --moe-shared-expert-intermediate-size 32")]
)
def test_a_run_is_its_plain_version(style: str, flags: str) -> None:
    """Gradients are the run's own; everything after them is computed again."""
    config = small_config(style, f"{MUON} {flags}")

    def compare() -> tuple[float, float]:
        run = build_run(config)
        names = {
            name: weight for chunk in run.training_state.chunks for name, weight in chunk.module.named_parameters()
        }
        start = {name: weight.detach().clone() for name, weight in names.items()}
        plain = PlainOptimizer(config, start)
        batches = build_batches(run, SourceSamples(32), 0, STEPS * 8, num_workers=0)
        for step in range(STEPS):
            rate = current_learning_rate(run.training_state.optimizer)
            found: dict[str, torch.Tensor] = {}

            def keep(totals: Any, found: dict[str, torch.Tensor] = found) -> None:
                found |= {name: weight.main_grad.clone() for name, weight in names.items()}

            assert train_step(run, batches, Progress(step, step * 8), keep).grad_norm > 1, "gradients are clipped"
            plain.update(found, rate)
        errors = [(weight - plain.weights[name]).norm().item() for name, weight in names.items()]
        moves = [(weight - start[name]).norm().item() for name, weight in names.items()]
        return max(error / move for error, move in zip(errors, moves, strict=True)), min(moves)

    ((error, smallest),) = run_ranks(1, compare)
    assert smallest > 0, "every weight is trained"
    # Relative to the distance that a weight moved: FP32 rounding of weights (2^-25 each) and of Newton-Schulz (some
    # 1e-6, tests/unit/optimizer/test_newton_schulz.py) in four updates of which each is some 1e-3 of a weight.
    assert error < 1e-3, error


def state_of(config: RunConfig, num_steps: int = STEPS) -> tuple[str, list[float], list[float], int]:
    """Fingerprint of the weights, losses, and elements of the optimizer state of a rank."""
    run = build_run(config)
    curve = train(run, num_steps)
    check_replicas(run, num_steps)
    parts = run.training_state.optimizer.chained_optimizers
    state = sum(tensor.numel() for part in parts for each in part.optimizer.state.values() for tensor in each.values())
    return fingerprint(weights(run)), curve.losses, curve.grad_norms, state


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(2, "", id="fp32"),
        pytest.param(2, "--bf16", id="bf16"),
        pytest.param(2, "--fp16 --initial-loss-scale 256", id="fp16"),
        pytest.param(2, "--bf16 --overlap-grad-reduce --ddp-bucket-size 20000", id="bf16-overlap"),
        pytest.param(2, "--bf16 --context-parallel-size 2", id="bf16-cp2"),
        pytest.param(4, f"{EXPERTS} --expert-model-parallel-size 2 {UNCLIPPED}", id="ep2-dp2"),
        pytest.param(4, f"--bf16 {EXPERTS} --expert-model-parallel-size 4 {UNCLIPPED}", id="bf16-ep4"),
    ],
)
def test_shared_state_gives_the_same_weights(world_size: int, flags: str) -> None:
    """Whole weights are updated by one rank or by all: to the bit the same, with a part of the state."""
    whole = run_ranks(world_size, state_of, small_config("llama", f"{MUON} {flags}", world_size))
    shared = run_ranks(world_size, state_of, small_config("llama", f"{MUON} {LAYER_WISE} {flags}", world_size))
    for ours, theirs in zip(shared, whole, strict=True):
        assert ours[:2] == theirs[:2]
        assert ours[2] == (pytest.approx(theirs[2], rel=2.0**-22) if "expert" in flags else theirs[2])
    sizes = [each[-1] for each in shared]
    assert "expert" in flags or sum(sizes) == whole[0][-1]
    assert max(sizes) < 0.75 * whole[0][-1]


def test_shared_state_has_one_moment_of_a_matrix() -> None:
    config = small_config("llama", MUON)

    def count() -> tuple[int, int]:
        run = build_run(config)
        train(run, 1)
        named = [(name, weight.numel()) for name, weight in run.training_state.chunks[0].named_parameters()]
        state = run.training_state.optimizer.chained_optimizers[0].optimizer.state
        found = sum(tensor.numel() for values in state.values() for tensor in values.values())
        tables = ("embedding", "output_layer", "norm", "bias")
        return found, sum((2 if any(table in name for table in tables) else 1) * size for name, size in named)

    ((found, expected),) = run_ranks(1, count)
    assert found == expected


@pytest.mark.parametrize(
    "flags",
    [f"{MUON} {LAYER_WISE}", MUON, f"{FP8_WEIGHTS} {LAYER_WISE}"],
    ids=["layer-wise", "all-ranks", "fp8-weights"],
)
def test_a_skipped_update_changes_nothing(flags: str) -> None:
    config = small_config("llama", f"{flags} --bf16 --spike-policy skip --max-skipped-steps 9", 2)

    def skip() -> tuple[bool, bool]:
        run = build_run(config)
        train(run, 2)
        before, optimizer = fingerprint(weights(run)), run.training_state.optimizer
        optimizer.step(lambda norm: False)
        is_unchanged = fingerprint(weights(run)) == before
        optimizer.step(lambda norm: True)
        return is_unchanged, fingerprint(weights(run)) == before

    assert run_ranks(2, skip) == [(True, False)] * 2


@pytest.mark.parametrize("flags", [LAYER_WISE, ""])
def test_an_overflow_lowers_the_loss_scale_on_all_ranks(flags: str) -> None:
    """FP16 overflows on one rank's gradients, which only the owner of a weight checks."""
    config = small_config(
        "llama", f"{MUON} {flags} --fp16 --initial-loss-scale 2**40".replace("2**40", str(2.0**40)), 2
    )

    def overflow() -> tuple[str, float, str]:
        run = build_run(config)
        before = fingerprint(weights(run))
        batches = build_batches(run, SourceSamples(32), 0, 24, num_workers=0)
        results = [train_step(run, batches, Progress(step, step * 8)) for step in range(3)]
        assert all(result.is_skipped for result in results)
        return before, current_loss_scale(run.training_state.optimizer), fingerprint(weights(run))

    for before, scale, after in run_ranks(2, overflow):
        assert before == after and scale < 2.0**40


def test_received_weights_are_counted() -> None:
    config = small_config("llama", f"{MUON} {LAYER_WISE} --bf16", 2)

    def count() -> tuple[int, int, int]:
        run = build_run(config)
        batches = build_batches(run, SourceSamples(32), 0, 8, num_workers=0)
        result = train_step(run, batches, Progress())
        optimizer = run.training_state.optimizer
        assert isinstance(optimizer, LayerWiseOptimizer)
        own = sum(weight.numel() for weight in optimizer.ownerships[0].of_this_rank)
        return (
            result.metrics["param_gather_bytes"],
            own,
            sum(weight.numel() for weight in run.training_state.chunks[0].parameters()),
        )

    for received, own, total in run_ranks(2, count):
        # Norms of heads, with 16 elements, are padded.
        assert 0 <= received - 2 * (total - own) < 0.02 * received


def test_statistics_of_updates_are_those_of_the_owners() -> None:
    """Ranks that do not own a weight have only its BF16 value, in which a small update is lost."""

    def updates(flags: str) -> dict[str, Any]:
        # Layers that quantize, so without MUON's --transformer-impl local.
        muon = "--optimizer muon --muon-extra-scale-factor 1e-3"
        config = small_config("llama", f"{muon} --bf16 {FP8} --fp8-log-interval 1 --lr-warmup-iters 0 {flags}", 2)
        record = run_ranks(2, lambda: statistics_record_of(build_run(config)))[0]
        found = {name: stats.update_to_weight for name, stats in record.tensors.items()}
        return {name: ratio for name, ratio in found.items() if ratio is not None}

    whole, shared = updates(""), updates(LAYER_WISE)
    assert len(whole) == 2 * 4 and all(whole.values()) and shared == pytest.approx(whole, rel=1e-6)
