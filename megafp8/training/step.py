"""A training step: forward-backward over the microbatches, the check for bad steps, and the optimizer's update."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Optional, Union

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megafp8.checkpoint.progress import ROLLBACK, Progress, SkippedSamples
from megafp8.data.loader import describe_samples, samples_of_step
from megafp8.mcore.process_groups import reset_param_gather
from megafp8.metrics.step_totals import SQUARED_NORM, STOPPING_RANKS, StepTotals, sum_over_ranks
from megafp8.models.layer_runtime import layer_runtime
from megafp8.nonfinite.gradients import describe_bad_ranks, loss_and_flags
from megafp8.nonfinite.operands import NonfiniteOperands
from megafp8.nonfinite.policy import SUM_OVERFLOWS, BadStep, StepSamples
from megafp8.optimizer.fused_adam import FusedAdamOptimizer
from megafp8.optimizer.schedules import can_lower_loss_scale, current_learning_rate, current_loss_scale
from megafp8.optimizer.skip_update import SkipUpdateOptimizer
from megafp8.resilience import fault_injection
from megafp8.training.cuda_graph import Batches, StepHooks
from megafp8.training.run import Run
from megafp8.training.step_parts import Reports


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on all ranks but for the numbers of bytes.

    Attributes:
        loss: mean over the tokens of the global batch, before the update.
        grad_norm: global norm before clipping; None after non-finite values.
        learning_rate: of the update.
        is_skipped: no update was made.
        bad_step: why it was skipped; None where a dynamic loss scale overflowed, which is no bad step.
        loss_scale: factor of the loss; None without a loss scale.
        nonfinite_operands: non-finite and saturated values of quantized operands.
        metrics: fields of the `StepRecord`, by the parts of the run.
        changed_progress: fields of the progress that the step changes beside those of every step.
    """

    loss: float
    grad_norm: Optional[float]
    learning_rate: float
    num_zeros_in_grad: Optional[int]
    is_skipped: bool
    bad_step: Optional[BadStep]
    loss_scale: Optional[float]
    nonfinite_operands: NonfiniteOperands = NonfiniteOperands()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    changed_progress: Mapping[str, Any] = field(default_factory=dict)


def train_step(
    run: Run,
    batches: Batches,
    progress: Progress,
    before_update: Callable[[StepTotals], None] = lambda totals: None,
    is_eager: bool = False,
    step_hooks: Sequence[StepHooks] = (),
    after_launch: Callable[[], None] = lambda: None,
) -> StepResult:
    """Train on one global batch.

    Args:
        batches: this rank's microbatches, None on a pipeline stage that reads none.
        progress: before the step.
        before_update: called after the gradients are reduced, before the update; not if the step is bad.
        is_eager: do not replay a CUDA graph, since a replay calls no hooks.
        step_hooks: in the forward and backward passes, which then have a CUDA graph of their own.
        after_launch: called when a device computes the passes: work of the host that it need not wait for.

    Raises:
        NumericsError: on all ranks: the step is bad and may not be skipped. The weights are unchanged.
    """
    training_state, parts = run.training_state, run.parts
    fault_injection.point("step.begin", step=progress.step + 1)
    totals, bad_step = pass_step(run, batches, progress, is_eager, step_hooks, after_launch)
    if any(part.must_repeat(totals) for part in parts):
        for part in parts:
            part.undo()
            part.skip()
        for hooks in step_hooks:
            hooks.restart()
        totals, bad_step = pass_step(run, run.graph.take_last_batches(), progress, is_eager=True, step_hooks=step_hooks)

    learning_rate = current_learning_rate(training_state.optimizer)
    loss_scale = current_loss_scale(training_state.optimizer)
    is_updated, grad_norm, num_zeros = False, None, None
    if bad_step is None:
        fault_injection.point("step.before_update")
        training_state.wait_for_copies()
        before_update(totals)
        with run.timer.span("optimizer"):
            is_updated, grad_norm, num_zeros, bad_step = update(run, progress, totals)
            for part in parts if is_updated else ():
                part.after_update(progress)
        fault_injection.poison("step.weights", next(training_state.chunks[0].parameters()))
        fault_injection.point("step.after_update")
    changed: dict[str, Any] = {}
    if is_updated:
        training_state.schedule.step(increment=run.batch_size_at(progress.consumed_samples))
        changed = {name: value for part in parts for name, value in part.changed_progress(progress, totals).items()}
    else:  # also where a loss scale overflowed
        undo_step(run, progress, bad_step)
    return StepResult(
        loss=totals.loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        # megatron-core counts zeros in FP32, to reduce them over the ranks.
        num_zeros_in_grad=None if num_zeros is None else int(num_zeros),
        is_skipped=not is_updated,
        bad_step=bad_step,
        loss_scale=loss_scale,
        nonfinite_operands=run.bad_steps.nonfinite,
        metrics=dict(itertools.chain.from_iterable(part.metrics(progress, totals).items() for part in parts)),
        changed_progress=changed,
    )


def pass_step(
    run: Run,
    batches: Batches,
    progress: Progress,
    is_eager: bool,
    step_hooks: Sequence[StepHooks],
    after_launch: Callable[[], None] = lambda: None,
) -> tuple[StepTotals, Optional[BadStep]]:
    """Forward and backward pass of a step, and its numbers; arguments as for `train_step`."""
    begin_step(run, progress)
    run.set_precision(progress.step + 1)
    with run.timer.span("forward-backward"):
        num_microbatches = run.num_microbatches_at(progress.consumed_samples)
        reports = forward_backward_or_replay(run, batches, num_microbatches, is_eager, step_hooks)
        optimizer = run.training_state.optimizer
        squared_norm = optimizer.squared_norm() if isinstance(optimizer, FusedAdamOptimizer) else None
        after_launch()
        fault_injection.point("step.after_backward")
        return sum_step(run, reports, progress, squared_norm)


def sum_step(
    run: Run, reports: Reports, progress: Progress, squared_norm: Optional[Tensor]
) -> tuple[StepTotals, Optional[BadStep]]:
    """Sum the numbers of a step over all ranks, and find out whether loss, gradients and operands are finite.

    Args:
        reports: of the losses of this rank's microbatches.
        progress: before the step.
        squared_norm: of the gradient shards that this rank updates with; None where the optimizer takes the norm.
    """
    device, detector = run.platform.device, run.bad_steps
    counted_loss = sum_losses(reports) if run.rank_position.reports_loss else None
    if counted_loss is not None:
        fault_injection.poison("step.loss", counted_loss[:1])
    bad = detector.gradients.counts(squared_norm)
    numbers = loss_and_flags(counted_loss, bad, device, bool(run.watchdog.received_signal))
    if squared_norm is not None:
        numbers[SQUARED_NORM] = squared_norm
    for part in run.parts:
        counts = part.counts(reports)
        assert not counts.keys() & numbers.keys(), f"two parts of a step count {counts.keys() & numbers.keys()}"
        numbers |= counts
    totals = sum_over_ranks(numbers, device)
    run.watchdog.agree_to_stop(totals.number(STOPPING_RANKS))
    names_saturated = (progress.step + 1) % run.config.logging.log_interval == 0
    detector.nonfinite = detector.operands.find(totals, names_saturated)

    def bad_ranks(is_loss_finite: bool) -> list[str]:
        samples = describe_rank_samples(run, progress)
        return describe_bad_ranks(detector.gradients, bad, counted_loss, samples, is_loss_finite)

    samples = samples_after(run, progress)
    return totals, detector.policy.find(totals, detector.nonfinite, samples, bad_ranks)


def sum_losses(reports: Reports) -> Optional[Tensor]:
    """(loss sum, tokens) over the microbatches of a step; None on a rank without reports."""
    return torch.stack([report["loss"] for report in reports]).sum(0) if reports else None


def samples_after(run: Run, progress: Progress) -> StepSamples:
    """The step after a progress, and the samples of its global batch."""
    first = progress.consumed_samples
    return StepSamples(progress.step + 1, range(first, first + run.batch_size_at(first)))


def describe_rank_samples(run: Run, progress: Progress) -> str:
    """The samples of the next global batch that this rank reads, in words."""
    return describe_samples(
        samples_of_step(
            consumed_samples=progress.consumed_samples,
            micro_batch_size=run.micro_batch_size,
            data_parallel_rank=run.rank_position.data_rank,
            data_parallel_size=run.rank_position.data_size,
            global_batch_size=run.batch_size_at(progress.consumed_samples),
        )
    )


def begin_step(run: Run, progress: Progress) -> None:
    """Clear gradients and counts, and save the state that a step without an update restores."""
    clear_gradients(run)
    for part in run.parts:
        part.begin(progress)


def undo_step(run: Run, progress: Progress, bad_step: Optional[BadStep]) -> None:
    """Restore the state that forward-backward changed, after a step without an update.

    Raises:
        NumericsError: on all ranks: the step is bad and may not be skipped.
    """
    for part in run.parts:
        part.undo()
    if bad_step is not None:
        run.bad_steps.policy.check_may_skip(progress, bad_step)
        for part in run.parts:
            part.skip()
        run.change_linears(bad_step.fallbacks)


def update(
    run: Run, progress: Progress, totals: StepTotals
) -> tuple[bool, Optional[float], Optional[float], Optional[BadStep]]:
    """Update the weights, unless loss or gradient norm spike.

    Returns:
        Whether the weights were updated, the norm before clipping, the number of zeros in the gradients if the run
        logs it, and why the update was skipped.
    """
    optimizer, policy, samples = run.training_state.optimizer, run.bad_steps.policy, samples_after(run, progress)
    bad_step: Optional[BadStep] = None
    if isinstance(optimizer, FusedAdamOptimizer):
        # Its norm was reduced together with the loss.
        bad_step = policy.of_spike(progress.history, totals.loss, totals.grad_norm, samples)
        return (False, totals.grad_norm, None, bad_step) if bad_step else (*optimizer.step(totals.grad_norm), None)

    def is_allowed(grad_norm: float) -> bool:
        nonlocal bad_step
        bad_step = policy.of_spike(progress.history, totals.loss, grad_norm, samples)
        return bad_step is None

    may_overflow = not run.config.training.check_for_nan_in_loss_and_grad or can_lower_loss_scale(optimizer)
    can_skip = isinstance(optimizer, SkipUpdateOptimizer)
    is_updated, *found = optimizer.step(is_allowed) if can_skip else optimizer.step()
    # megatron-core 0.19 leaves both on the device.
    grad_norm, num_zeros = (None if value is None else float(value) for value in found)
    if not is_updated and bad_step is None and not may_overflow:
        bad_step = policy.of_numbers(samples, [SUM_OVERFLOWS])
    return is_updated, grad_norm, num_zeros, bad_step


def progress_after_step(
    run: Run,
    progress: Progress,
    bad_step: Optional[BadStep],
    values: Optional[tuple[float, float]],
    changed: Mapping[str, Any] = MappingProxyType({}),
) -> Progress:
    """The progress after a step.

    Args:
        bad_step: why its update was skipped, if it was.
        values: loss and gradient norm of a step that updated the weights; None where the loss scale overflowed.
        changed: further fields that the step changes.
    """
    step, history = progress.step + 1, progress.history
    consumed = progress.consumed_samples + run.batch_size_at(progress.consumed_samples)
    if bad_step is not None:
        history = history.after_skip(SkippedSamples(progress.consumed_samples, consumed, step, bad_step.reason))
        history = history.after_fallback(bad_step.fallbacks)
    elif values is not None:
        spikes = run.bad_steps.policy.spikes
        history = history.after_update(spikes.after_update(history.window, *values) if spikes else ())
    else:
        history = history.after_overflow()
    return dataclasses.replace(progress, step=step, consumed_samples=consumed, history=history, **changed)


def progress_after_rollback(run: Run, failed: Progress, loaded: Progress, num_batches: int) -> Progress:
    """The progress after a rollback past some global batches, which count as steps without an update.

    Args:
        failed: before the step that failed.
        loaded: that of the checkpoint.
    """
    end = run.batch_schedule.advance(num_batches, loaded.consumed_samples)
    skipped = SkippedSamples(loaded.consumed_samples, end, failed.step + 1, ROLLBACK)
    history = dataclasses.replace(
        loaded.history,
        skipped=(*loaded.history.skipped, skipped),
        num_in_row=0,
        num_rollbacks=failed.history.num_rollbacks + 1,
        moved_linears=failed.history.moved_linears,  # they stay in high precision
    )
    return dataclasses.replace(loaded, step=loaded.step + num_batches, consumed_samples=end, history=history)


def clear_gradients(run: Run) -> None:
    """Reset the gradient buffers for the next step."""
    for part in run.parts:
        part.clear_gradients()
    run.training_state.optimizer.zero_grad()


def forward_backward_or_replay(
    run: Run, batches: Batches, num_microbatches: int, is_eager: bool = False, step_hooks: Sequence[StepHooks] = ()
) -> list[dict[str, Tensor]]:
    """Forward-backward of a step, replayed from a CUDA graph where the run has one and the step may use it."""

    def eager(batches: Batches) -> list[dict[str, Tensor]]:
        if run.graph.has_graphs:
            reset_param_gather(run.training_state.chunks)
        with ExitStack() as stack:
            for hooks in step_hooks:
                stack.enter_context(hooks.attached())
            return forward_backward(run, batches, num_microbatches, forward_only=False)

    if is_eager:
        return eager(batches)
    return run.graph.run(eager, batches, num_microbatches, step_hooks)


def forward_or_replay(run: Run, batches: Batches, num_microbatches: int) -> list[dict[str, Tensor]]:
    """Forward passes of an evaluation, replayed from a CUDA graph where the run has one."""

    def eager(batches: Batches) -> list[dict[str, Tensor]]:
        return forward_backward(run, batches, num_microbatches, forward_only=True)

    return run.graph.evaluate(eager, batches, num_microbatches)


def forward_backward(
    run: Run,
    batches: Batches,
    num_microbatches: int,
    forward_only: bool,
    forward_step: Optional[Callable[..., Any]] = None,
    seq_length: Optional[int] = None,
) -> list[dict[str, Tensor]]:
    """Run megatron-core's pipeline schedule; returns the reports of the losses on the last stage, else none.

    Args:
        forward_step: megatron-core's callback; default the run's.
        seq_length: tokens in a sequence of the batches; default the run's.
    """
    chunks = run.training_state.chunks
    schedule = get_forward_backward_func()
    with layer_runtime(run.implementation).cached_weights(chunks):
        return schedule(
            forward_step_func=forward_step or run.forward_step,
            data_iterator=batches_of_chunks(run, batches),
            model=chunks,
            num_microbatches=num_microbatches,
            seq_length=seq_length or run.seq_length,
            micro_batch_size=run.micro_batch_size,
            forward_only=forward_only,
        )


def batches_of_chunks(run: Run, batches: Batches) -> Union[Batches, list[Batches]]:
    """The data iterators of the model chunks, as megatron-core's schedule takes them.

    Under the interleaved schedule only the first chunk of the model and its last one read batches, unless all need the
    borders of documents.
    """
    num_chunks, rank_position = len(run.training_state.chunks), run.rank_position
    if num_chunks == 1:
        return batches
    if rank_position.needs_documents and batches is not None:
        return list(itertools.tee(batches, num_chunks))  # every chunk reads all microbatches of the step
    readers = {0} if rank_position.is_first_stage else set()
    if rank_position.is_last_stage:
        readers.add(num_chunks - 1)
    return [batches if chunk in readers else None for chunk in range(num_chunks)]
