"""Non-finite values on one rank: all ranks skip the same update, and their state is unchanged, bitwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_runs import run_forked
from megatron.core.utils import unwrap_model
from nonfinite_runs import inject, run_loop
from ranks import run_ranks
from small_run import (
    COMMON,
    FOUR_LAYERS,
    FP8,
    PLAIN,
    STYLES,
    SourceSamples,
    build_run,
    fingerprint,
    small_config,
    weights,
)
from torch import Tensor

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.metadata import read_contents
from megafp8.checkpoint.progress import NOT_FINITE, Progress, SkipHistory, SkippedSamples
from megafp8.quantization.delayed_scaling import DelayedState
from megafp8.resilience.run_state import read_run_state
from megafp8.training.evaluation import build_batches
from megafp8.training.run import Run
from megafp8.training.step import progress_after_step, train_step

BAD_STEP, STEPS, BATCH = 3, 5, 8
SKIP = "--max-skipped-steps 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2 --micro-batch-size 2"
DELAYED = (
    "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 8 --fp8-amax-compute-algo max "
    "--fp8-delayed-start te"
)
LENGTH = f"{PLAIN} --train-iters 6"


def poison_embedding(run: Run, bad_rank: int) -> None:
    """One element of the embedding's output is infinite, in the first microbatch of the bad step."""
    embedding = getattr(unwrap_model(run.training_state.chunks[0]), "embedding", None)
    if embedding is None or dist.get_rank() != bad_rank:
        return
    num_passes = [0]

    def spoil(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        num_passes[0] += 1
        if num_passes[0] != (BAD_STEP - 1) * run.num_microbatches + 1:
            return output
        spoiled = output.clone()
        spoiled.view(-1)[0] = torch.inf
        return spoiled

    embedding.register_forward_hook(spoil)


@dataclass(frozen=True)
class Seen:
    """The state of a rank after some steps.

    Attributes:
        states: hash of weights, master weights, moments, histories, scales and schedule after each step.
        texts: the findings of skipped steps.
        progress: at the end.
    """

    states: list[str]
    texts: list[str]
    progress: Progress


def full_state(run: Run) -> dict[str, Tensor]:
    """Everything that a step changes on this rank."""
    state = weights(run)
    for index, part in enumerate(run.training_state.optimizer.chained_optimizers):
        for number, values in enumerate(part.optimizer.state.values()):
            state |= {f"{index}.{number}.{name}": value for name, value in values.items() if isinstance(value, Tensor)}
    for chunk in run.training_state.chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, DelayedState):
                state |= {f"{name}.{buffer}": value for buffer, value in module.named_buffers()}
    state["samples of the schedule"] = torch.tensor(run.training_state.schedule.num_steps)
    return {name: value.detach().clone().reshape(-1) for name, value in state.items()}


def steps(flags: str, world_size: int, prepare: Callable[[Run], None], left_out: tuple[int, ...] = ()) -> Seen:
    """Train some steps. The samples of skipped steps are consumed."""
    run = build_run(small_config("llama", flags, world_size))
    prepare(run)
    states, texts, progress = [], [], Progress()
    for step in range(1, STEPS + 1):
        if step in left_out:
            progress = Progress(step, step * BATCH)
            continue
        batches = build_batches(run, SourceSamples(32), (step - 1) * BATCH, step * BATCH, num_workers=0)
        result = train_step(run, batches, progress)
        progress = progress_after_step(run, progress, result.bad_step, (result.loss, result.grad_norm or 0.0))
        states.append(fingerprint(full_state(run)))
        texts += [] if result.bad_step is None else [result.bad_step.text]
    return Seen(states, texts, progress)


CASES = [
    pytest.param(2, PLAIN, "nan:rank=1,step=3,at=step.loss", id="loss"),
    pytest.param(2, f"--bf16 {FP8} {OVERLAP}", "inf:rank=1,step=3,at=step.gradients", id="gradient-fp8-overlap"),
    pytest.param(2, f"{DELAYED} {TENSOR}", "nan:rank=1,step=3,at=step.gradients", id="gradient-delayed-tp2"),
    pytest.param(2, f"{PLAIN} {PIPELINE}", "nan:rank=1,step=3,at=step.loss", id="loss-pp2"),
    pytest.param(2, f"{DELAYED} --fp8-param-gather --use-distributed-optimizer", "embedding", id="embedding-delayed"),
    pytest.param(4, f"--bf16 {FP8} {TENSOR} {OVERLAP}", "nan:rank=3,step=3,at=step.gradients", id="gradient-dp2-tp2"),
]


@pytest.mark.parametrize(("world_size", "flags", "fault"), CASES)
def test_a_skipped_step_changes_nothing(world_size: int, flags: str, fault: str) -> None:
    """The next steps equal those of a run without its samples."""

    def spoiled() -> Seen:
        if fault == "embedding":
            return steps(f"{flags} {SKIP}", world_size, lambda run: poison_embedding(run, world_size - 1))
        inject(fault)
        return steps(f"{flags} {SKIP}", world_size, lambda run: None)

    def without() -> Seen:
        return steps(flags, world_size, lambda run: None, left_out=(BAD_STEP,))

    answers, references = run_ranks(world_size, spoiled), run_ranks(world_size, without)
    (text,) = answers[0].texts
    for seen, reference in zip(answers, references, strict=True):
        assert seen.states[BAD_STEP - 1] == seen.states[BAD_STEP - 2], "the bad step moved something"
        del seen.states[BAD_STEP - 1]
        assert seen.states == reference.states
        assert seen.texts == [text], "every rank says the same"
        assert seen.progress == answers[0].progress
    assert len(set(answers[0].states)) == STEPS - 1, "the other steps moved nothing"
    assert answers[0].progress.history == SkipHistory((SkippedSamples(16, 24, BAD_STEP, NOT_FINITE),))
    assert f"rank {world_size - 1}: " in text and "samples 16-23" in text


def test_every_skip_is_recorded_and_in_the_checkpoint(tmp_path: Path) -> None:
    """Steps 2 and 3 are bad, the run stops after 3 and resumes; then 5 is bad, and one more may be skipped."""
    plan = "nan:rank=1,step=2,at=step.gradients;inf:rank=0,step=3,at=step.loss;nan:rank=1,step=5,at=step.loss"
    assert run_loop(tmp_path, plan, f"{LENGTH} {SKIP} --exit-interval 3").progress.history.num_in_row == 2
    finished = run_loop(tmp_path, plan, f"{LENGTH} {SKIP}").progress
    assert (finished.step, finished.consumed_samples) == (6, 48)
    assert [(samples.first, samples.end, samples.step) for samples in finished.history.skipped] == [
        (8, 16, 2), (16, 24, 3), (32, 40, 5)
    ]  # fmt: skip
    run = load_run(tmp_path)
    assert [record.step for record in run.steps if record.is_skipped] == [2, 3, 5]
    details = {event.step: event.detail for event in run.events if event.name == "step skipped"}
    assert list(details) == [2, 3, 5]
    assert "(samples 8-15)" in details[2] and "rank 1: first bad tensor: gradient of " in details[2]
    assert details[2].endswith("samples 12-15"), "those of the rank"
    assert "rank 0: loss is not finite; first bad tensor: none; weights and gradients are finite; " in details[3]
    assert details[3].endswith("samples 16-19")
    (summary,) = (event.detail for event in run.events if event.name == "skipped" and event.step == 6)
    assert summary == "24 samples were consumed without an update (24 not finite): 8-15, 16-23, 32-39"
    assert read_contents(checkpoint_path(tmp_path, 6)).history == finished.history


def test_too_many_consecutive_skips_stop_the_run(tmp_path: Path) -> None:
    """Two may be skipped; the third is an error, also when the run was stopped between them."""
    plan = "".join(f"nan:rank=1,step={step},at=step.loss;" for step in (1, 3, 4, 5))
    assert run_loop(tmp_path, plan, f"{LENGTH} {SKIP} --exit-interval 4").progress.history.num_in_row == 2
    text = run_loop(tmp_path, plan, f"{LENGTH} {SKIP}").error
    assert text.startswith("step 5: loss or gradients are not finite (samples 32-39):\n  rank 1: loss is not finite; ")
    assert "the weights were not updated, after 2 consecutive skipped updates (--max-skipped-steps 2)" in text
    (event,) = (event for event in load_run(tmp_path).events if event.name == "bad numbers")
    assert (event.step, event.detail) == (5, text)


def test_nonfinite_values_exit_with_status_65(tmp_path: Path) -> None:
    """On every rank, and one of them reports why."""
    flags = f"{COMMON} {STYLES['llama']} {LENGTH} --num-workers 2"  # the error must end the loader's processes
    flags += f" --data-cache-path {tmp_path} --save {tmp_path / 'run'}"
    ended = run_forked(2, flags, "nan:rank=1,step=2,at=step.gradients")
    assert set(ended.statuses) == {65}, ended.report()
    assert "NumericsError: step 2: loss or gradients are not finite (samples 8-15):" in ended.output[0]
    assert "NumericsError" not in ended.output[1]
    state = read_run_state(tmp_path / "run")
    assert (state.state, state.exit_status, state.step) == ("failed", 65, 1)


def test_loss_scale_overflow_does_not_count_as_skipped_step(tmp_path: Path) -> None:
    """FP16 finds its loss scale by trial, and no step may be skipped here. A non-finite loss still counts."""
    flags = f"{LENGTH} --fp16 --initial-loss-scale 4294967296 --hysteresis 1 --exit-interval 2"
    assert run_loop(tmp_path / "overflow", "", flags, 1).progress == Progress(2, 16, SkipHistory(num_overflows=2))
    assert [record.is_skipped for record in load_run(tmp_path / "overflow").steps] == [True, True]
    assert "step 2: " in run_loop(tmp_path / "nan", "nan:step=2,at=step.loss", flags, 1).error


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_delayed_scales_recover_from_a_nonfinite_amax(kind: str) -> None:
    """Loss and gradients are finite, and the step is made. NaN has no effect, infinity lasts as long as the history."""

    def scales() -> list[list[float]]:
        inject(f"{kind}:step=2,rank=1,times=2,at=step.amax")  # forward, then backward
        flags = f"{FOUR_LAYERS} {DELAYED.replace('len 8', 'len 2')} --micro-batch-size 4"
        run = build_run(small_config("llama", flags, 2))
        state = next(module for module in run.training_state.chunks[0].modules() if isinstance(module, DelayedState))
        seen, progress = [], Progress()
        for step in range(1, STEPS + 1):
            batches = build_batches(run, SourceSamples(32), (step - 1) * BATCH, step * BATCH, num_workers=0)
            result = train_step(run, batches, progress)
            progress = progress_after_step(run, progress, result.bad_step, None)
            assert torch.isfinite(state.quant_scale).all()
            assert not state.amax_history.isnan().any()
            seen.append(state.quant_scale.tolist())
        assert state.amax_history.isfinite().all(), "it has left the history"
        return seen

    first, second = run_ranks(2, scales)
    assert first == second
    assert len({scale[2] for scale in first[2:]}) == 3, "and the scale of the output's gradient moves again"
