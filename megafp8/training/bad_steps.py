"""Bad steps: non-finite losses and gradients, loss spikes, and what a run does about them.

This is the policy: skip the update, roll back to a checkpoint, or stop. `optimizer/gradient_checks.py` finds non-finite
gradients, `optimizer/skip_update.py` has the spike rule, and `training/extensions/rollback.py` carries out a rollback.

A skipped update changes nothing: weights, moments, learning-rate schedule, the biases of experts and the amax histories
of delayed scaling stay bitwise the same. The samples of the step count as consumed, and its random numbers as drawn.
All ranks take the same decision, since they decide by values that were reduced over all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Optional

import torch
from torch import Tensor

from megafp8.checkpoint.progress import (
    NOT_FINITE,
    OPERAND,
    ROLLBACK,
    SPIKE,
    HighPrecisionFallback,
    Progress,
    SkippedSamples,
)
from megafp8.config.health_case import health_case
from megafp8.data.loader import describe_samples, samples_of_step
from megafp8.errors import NumericsError
from megafp8.metrics.health_suggestions import for_nonfinite_values
from megafp8.optimizer import gradient_checks
from megafp8.optimizer.gradient_checks import StepTotals
from megafp8.optimizer.schedules import can_lower_loss_scale, current_loss_scale, describe_overflow
from megafp8.quantization.delayed_scaling import OPERANDS
from megafp8.resilience import fault_injection
from megafp8.training.nonfinite_operands import (
    FORWARD_OPERANDS,
    MAX_NAMED,
    NonfiniteOperands,
)
from megafp8.training.run import Run
from megafp8.training.step_parts import Reports

SUM_OVERFLOWS = "gradients overflow in the sum over all ranks"


@dataclass(frozen=True)
class BadStep:
    """Why a step must not update the weights; the same on all ranks.

    Attributes:
        reason: NOT_FINITE, SPIKE or OPERAND.
        text: the values, the ranks and the samples.
        fallbacks: linears that are in high precision from the next step on.
    """

    reason: str
    text: str
    fallbacks: tuple[HighPrecisionFallback, ...] = ()


# ---- detection -------------------------------------------------------------------------------------------------------


def sum_step(
    run: Run, reports: Reports, progress: Progress, squared_norm: Optional[Tensor] = None
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
    bad = detector.gradients.bad_gradients(squared_norm)
    numbers = gradient_checks.loss_and_flags(counted_loss, bad, device, bool(run.watchdog.received_signal))
    if squared_norm is not None:
        numbers[gradient_checks.SQUARED_NORM] = squared_norm
    for part in run.parts:
        counts = part.counts(reports)
        assert not counts.keys() & numbers.keys(), f"two parts of a step count {counts.keys() & numbers.keys()}"
        numbers |= counts
    totals = gradient_checks.sum_over_ranks(numbers, device)
    run.watchdog.agree_to_stop(totals.number(gradient_checks.STOPPING_RANKS))
    names_saturated = (progress.step + 1) % run.config.logging.log_interval == 0
    nonfinite = detector.find_operands(totals, names_saturated)
    if not totals.number(gradient_checks.BAD_RANKS) or not run.config.training.check_for_nan_in_loss_and_grad:
        return totals, find_bad_operands(run, progress, nonfinite)
    is_loss_finite = math.isfinite(totals[gradient_checks.LOSS][0])
    if is_loss_finite and can_lower_loss_scale(run.training_state.optimizer):
        # The optimizer finds the overflow itself, skips the update and lowers the loss scale.
        return totals, None
    local_bad = detector.gradients.find_local()
    ranks = gradient_checks.describe_bad_ranks(
        counted_loss, bool(bad > 0), run.training_state.chunks, describe_rank_samples(run, progress), local_bad
    )
    if local_bad is None and is_loss_finite and detector.gradients.origin_text:
        ranks.append(detector.gradients.origin_text)
    if bad_step := find_bad_operands(run, progress, nonfinite, ranks, is_loss_finite):
        return totals, bad_step
    if nonfinite.non_finite_operands():
        ranks.append(f"operands of quantized linears: {nonfinite.describe()}")
    return totals, non_finite_step(run, progress, ranks)


def sum_losses(reports: Reports) -> Optional[Tensor]:
    """(loss sum, tokens) over the microbatches of a step; None on a rank without reports."""
    return torch.stack([report["loss"] for report in reports]).sum(0) if reports else None


def non_finite_step(run: Run, progress: Progress, causes: list[str]) -> BadStep:
    """A step with non-finite numbers, from a line for each cause. A loss scale that cannot fall is another cause."""
    loss_scale = current_loss_scale(run.training_state.optimizer)
    scaling = [] if loss_scale is None else [describe_overflow(run.config.optimizer, loss_scale)]
    lines = "\n".join(f"  {line}" for line in [*causes, *scaling])
    return BadStep(NOT_FINITE, f"loss or gradients are not finite ({describe_batch_samples(run, progress)}):\n{lines}")


def find_bad_operands(
    run: Run, progress: Progress, nonfinite: NonfiniteOperands, ranks: Sequence[str] = (), is_loss_finite: bool = True
) -> Optional[BadStep]:
    """The bad step of non-finite operands under `--on-nonfinite-activation`; None if there are none, or under `warn`.

    Where loss or gradients are not finite, the operands after the first one follow from it, so that the first one is
    named and its linear moved. Output gradients also follow from a loss that is not finite, and do not count then.

    Args:
        progress: before the step.
        ranks: a line for each rank whose loss or gradients are not finite.
        is_loss_finite: whether the loss of all ranks is.
    """
    policy = run.config.training.on_nonfinite_activation
    operands = OPERANDS if is_loss_finite else FORWARD_OPERANDS
    found = list(nonfinite.non_finite_operands(operands))
    if policy == "warn" or not found:
        return None
    text = nonfinite.describe(operands, 1 if ranks else MAX_NAMED)
    fallbacks: tuple[HighPrecisionFallback, ...] = ()
    if policy == "bf16":
        linears = dict.fromkeys(tensor.rpartition(".")[0] for tensor in (found[:1] if ranks else found))
        fallbacks = tuple(HighPrecisionFallback(linear, progress.step + 1, OPERAND) for linear in linears)
    lines = "".join(f"\n  {line}" for line in ("loss or gradients are not finite either:", *ranks)) if ranks else ""
    samples = describe_batch_samples(run, progress)
    return BadStep(OPERAND, f"operands of quantized linears are not finite ({samples}): {text}{lines}", fallbacks)


def find_spike(run: Run, progress: Progress, loss: float, grad_norm: float) -> Optional[BadStep]:
    """The spike of a step's loss or gradient norm, if there is one.

    Args:
        progress: before the step.
    """
    text = run.bad_steps.spikes.find_spike(progress.history.window, loss, grad_norm)
    return None if text is None else BadStep(SPIKE, f"{text} ({describe_batch_samples(run, progress)})")


def describe_batch_samples(run: Run, progress: Progress) -> str:
    """The samples of the next global batch, in words."""
    first = progress.consumed_samples
    return describe_samples(range(first, first + run.batch_size_at(first)))


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


# ---- decision --------------------------------------------------------------------------------------------------------


def check_may_skip(run: Run, progress: Progress, bad_step: BadStep) -> None:
    """Return if the update may be skipped.

    Raises:
        NumericsError: `--max-skipped-steps` were skipped in a row, or bad steps of this kind are not to be skipped.
    """
    training = run.config.training
    is_skippable = {
        NOT_FINITE: True,
        SPIKE: training.spike_policy == "skip",
        OPERAND: training.on_nonfinite_activation in ("skip", "bf16"),
    }[bad_step.reason]
    num_before = progress.history.num_in_row
    if is_skippable and num_before < training.max_skipped_steps:
        return
    limit = ""
    if is_skippable and num_before:
        limit = f", after {num_before} consecutive skipped updates (--max-skipped-steps {training.max_skipped_steps})"
    suggestions = "; ".join(for_nonfinite_values(health_case(run.config)))
    raise NumericsError(
        f"step {progress.step + 1}: {bad_step.text}\nthe weights were not updated{limit}\nfix: resume from the last "
        f"checkpoint with other data (--override-sample-order), or try one of: {suggestions}; a "
        "different schedule needs --override-opt_param-scheduler, a different precision --override-precision"
    )


def is_rollback_allowed(run: Run, progress: Progress) -> bool:
    """Whether a run whose step failed may roll back to a checkpoint."""
    training = run.config.training
    return training.spike_policy == "rollback" and progress.history.num_rollbacks < training.max_rollbacks


# ---- progress --------------------------------------------------------------------------------------------------------


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
        history = history.after_update(run.bad_steps.spikes.after_update(history.window, *values))
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
