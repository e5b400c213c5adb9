"""Validation computes the loss of one rank in every layout, and does not affect training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from ranks import run_ranks
from small_run import (
    FP8,
    PLAIN,
    VIRTUAL,
    SourceSamples,
    build_run,
    fingerprint,
    layers_of,
    small_config,
    statistics_step,
    train,
    weights,
)
from tolerances import LAYOUT_LOSS
from torch import Tensor

from megafp8.config.schema import RunConfig
from megafp8.metrics.records import VALID, VALID_HIGH_PRECISION, EvalRecord
from megafp8.training.cuda_graph import Batch, Passes
from megafp8.training.evaluation import build_batches, evaluate
from megafp8.training.extensions.statistics import StatisticsCollector

TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
JITTER = "--num-experts 4 --moe-router-topk 2 --moe-input-jitter-eps 0.1"
LAYOUTS = [
    pytest.param(1, "--micro-batch-size 1", id="micro1"),
    pytest.param(2, TENSOR, id="tp2-sp"),
    pytest.param(2, VIRTUAL, id="pp2-virtual2"),
    pytest.param(2, OVERLAP, id="dp2-overlap"),
    pytest.param(2, "--context-parallel-size 2", id="cp2"),
    pytest.param(4, f"{VIRTUAL} {OVERLAP} --micro-batch-size 1", id="pp2-virtual2-dp2-overlap"),
]


def validate_after(config: RunConfig, num_steps: int) -> EvalRecord:
    """Train a few steps, then compute the loss on samples with different numbers of counted tokens."""
    run = build_run(config)
    train(run, num_steps)
    return evaluate(run, "valid", SourceSamples(run.config.data.seq_length, is_masked=True), num_steps, 0)


def validate_twice(config: RunConfig) -> list[float]:
    """The loss as a run computes it, in high precision, and as the run computes it again."""
    run = build_run(config)
    samples = SourceSamples(run.config.data.seq_length)
    return [evaluate(run, split, samples, 0, 0).loss for split in (VALID, VALID_HIGH_PRECISION, VALID)]


def test_a_validation_in_high_precision_quantizes_nothing() -> None:
    (own, high, again), (plain, same, _) = (
        run_ranks(1, validate_twice, small_config("llama", flags))[0] for flags in (FP8, PLAIN)
    )
    assert own == again != high == plain == same


@pytest.mark.parametrize(("world_size", "flags"), LAYOUTS)
def test_every_layout_gives_the_same_loss(world_size: int, flags: str) -> None:
    expected = run_ranks(1, validate_after, small_config("llama", f"{PLAIN} {layers_of(flags)}"), 2)[0]
    config = small_config("llama", f"{PLAIN} {flags}", world_size)
    for record in run_ranks(world_size, validate_after, config, 2):
        assert record.loss == pytest.approx(expected.loss, abs=LAYOUT_LOSS, rel=0)
        assert record.num_tokens == expected.num_tokens < 2 * 8 * 32


@pytest.mark.parametrize(("world_size", "flags"), [*LAYOUTS, pytest.param(1, JITTER, id="jitter")])
def test_validation_does_not_change_training(world_size: int, flags: str) -> None:
    """Bitwise: random generators, pending gathers and weight codes are unchanged."""
    precision = f"--bf16 {FP8} {DROPOUT}" if "context" not in flags else f"{PLAIN} {DROPOUT}"
    config = small_config("llama" if flags == JITTER else "gpt2", f"{precision} {flags}", world_size)

    def steps(is_validated: bool) -> tuple[list[float], str]:
        run = build_run(config)
        losses = train(run, 1).losses
        if is_validated:
            evaluate(run, "valid", SourceSamples(run.config.data.seq_length), 1, 0)
        losses += train(run, 2, 2).losses
        return losses, fingerprint(weights(run))

    assert run_ranks(world_size, steps, True) == run_ranks(world_size, steps, False)


class Replays:
    """A graph as the host sees it: replays gather weights like the captured steps, and record nothing."""

    has_graphs = True

    def __init__(self, chunks: list[Any], warm_up_steps: int):
        self.groups = [group for chunk in chunks for group in chunk.bucket_groups]
        self.steps_left, self.has_run_hooks = warm_up_steps, False
        self.captured: dict[str, list[bool]] = {}

    def run(
        self, passes: Passes, batches: Iterator[Batch], num_microbatches: int, step_hooks: Any
    ) -> list[dict[str, Tensor]]:
        if step_hooks:
            if "step" in self.captured and self.has_run_hooks:
                return self.captured_or_replayed("step with hooks", passes, batches)
            self.has_run_hooks = True
            return passes(batches)
        if self.steps_left:
            self.steps_left -= 1
            return passes(batches)
        return self.captured_or_replayed("step", passes, batches)

    def captured_or_replayed(self, graph: str, passes: Passes, batches: Iterator[Batch]) -> list[dict[str, Tensor]]:
        noted, is_captured = [group.param_gather_dispatched for group in self.groups], graph in self.captured
        self.note(self.captured.setdefault(graph, noted))
        reports = passes(batches)
        if is_captured:
            self.note(noted)
        return reports

    def evaluate(self, passes: Passes, batches: Iterator[Batch], num_microbatches: int) -> list[dict[str, Tensor]]:
        return passes(batches)

    def note(self, are_gathered: list[bool]) -> None:
        for group, is_gathered in zip(self.groups, are_gathered, strict=True):
            group.param_gather_dispatched = is_gathered


def test_graph_steps_gather_weights_after_validation_and_statistics() -> None:
    """Both gather weights immediately. megatron-core's next forward pass then does not gather."""
    validated = (2, 4, 6, 8)  # before the captures, and before a replay of a statistics step
    config = small_config("llama", f"--bf16 {FP8} {OVERLAP} --fp8-log-interval 3", 2)

    def losses(has_graph: bool) -> list[float]:
        run, found = build_run(config), []
        if has_graph:
            run = dataclasses.replace(run, graph=Replays(run.training_state.chunks, warm_up_steps=2))
        collector = StatisticsCollector(run)
        samples, size = SourceSamples(run.config.data.seq_length), run.global_batch_size
        batches = build_batches(run, samples, 0, 13 * size, num_workers=0)
        for step in range(1, 14):
            found.append(statistics_step(run, batches, step, collector)[0].loss)
            if step in validated:
                found.append(evaluate(run, "valid", samples, step, 0).loss)
        return found

    assert run_ranks(2, losses, True) == run_ranks(2, losses, False)


def test_validation_disables_dropout() -> None:
    """The validation loss of the same weights is deterministic."""
    config = small_config("gpt2", f"{PLAIN} {DROPOUT}")

    def twice() -> tuple[float, float]:
        run = build_run(config)
        samples = SourceSamples(run.config.data.seq_length)
        return evaluate(run, "valid", samples, 0, 0).loss, evaluate(run, "valid", samples, 0, 0).loss

    ((first, second),) = run_ranks(1, twice)
    assert first == second
