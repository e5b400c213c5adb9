"""Bad steps: non-finite losses and gradients, loss spikes, and what a run does about them.

This is the policy: skip the update, roll back to a checkpoint, or stop. `optimizer/gradient_checks.py` finds non-finite
gradients, `optimizer/skip_update.py` has the spike rule, and `training/extensions/rollback.py` carries out a rollback.

A skipped update changes nothing: weights, moments, learning-rate schedule and the amax histories of delayed scaling
stay bitwise the same. The samples of the step count as consumed, and its random numbers as drawn. All ranks take the
same decision, since they decide by values that were reduced over all of them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Optional

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megafp8.checkpoint.progress import NOT_FINITE, ROLLBACK, SPIKE, Progress, SkippedSamples, TrainingState
from megafp8.config.schema import RunConfig
from megafp8.data.loader import describe_samples, samples_of_step
from megafp8.errors import NumericsError
from megafp8.metrics.health_advice import Case, advice, for_nonfinite_values
from megafp8.optimizer import gradient_checks
from megafp8.optimizer.fused_adam import FusedAdamOptimizer
from megafp8.optimizer.schedules import can_lower_loss_scale, current_loss_scale, describe_overflow
from megafp8.optimizer.skip_update import SpikeDetector
from megafp8.resilience import fault_injection
from megafp8.training.checks import machine_problems
from megafp8.training.run import Run

SUM_OVERFLOWS = "gradients overflow in the sum over all ranks"


@dataclass(frozen=True)
class BadStep:
    """Why a step must not update the weights; the same on all ranks.

    Attributes:
        reason: NOT_FINITE or SPIKE.
        text: the values, the ranks and the samples.
    """

    reason: str
    text: str


# ---- detection -------------------------------------------------------------------------------------------------------


def build_gradient_monitor(
    config: RunConfig, trainee: TrainingState, device: torch.device
) -> Optional[gradient_checks.NonFiniteGradientMonitor]:
    """The check of each rank's local gradients before they are reduced; None where the gradient norm is enough.

    The fused optimizer's norm is enough where every rank holds the complete model, or where there is no data
    parallelism: `find_local_bad_gradients` can then tell afterwards which rank the non-finite values came from.
    """
    data_size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    is_norm_enough = isinstance(trainee.optimizer, FusedAdamOptimizer) and data_size in (1, dist.get_world_size())
    if is_norm_enough or not config.training.check_for_nan_in_loss_and_grad:
        return None
    return gradient_checks.NonFiniteGradientMonitor(trainee.chunks, device)


def build_spike_detector(config: RunConfig) -> Optional[SpikeDetector]:
    """The detector of loss spikes; None without `--spike-policy`."""
    training = config.training
    if training.spike_policy == "off":
        return None
    return SpikeDetector(training.spike_window, training.spike_sigma, training.spike_min_steps)


def reduce_step_totals(
    run: Run, local_loss: Optional[Tensor], progress: Progress, squared_norm: Optional[Tensor] = None
) -> tuple[gradient_checks.StepTotals, Optional[BadStep]]:
    """Reduce the loss of a step over all ranks, and find out whether loss and gradients are finite.

    Args:
        local_loss: (loss sum, tokens) of this rank; None on a rank that computes no loss.
        progress: before the step.
        squared_norm: of the gradient shards that this rank updates with; None where the optimizer takes the norm.
    """
    device, monitor = run.platform.device, run.gradient_monitor
    counted_loss = local_loss if run.place.reports_loss else None
    if counted_loss is not None:
        fault_injection.poison("step.loss", counted_loss[:1])
    bad = torch.zeros((), device=device) if monitor is None else monitor.bad
    if monitor is None and squared_norm is not None:
        bad = (~torch.isfinite(squared_norm)).float()
    totals = gradient_checks.reduce_step_totals(
        counted_loss, bad, device, squared_norm, bool(run.guard.received_signal)
    )
    run.guard.agree_to_stop(totals.num_stopping_ranks)
    if not totals.num_bad_ranks or not run.config.training.check_for_nan_in_loss_and_grad:
        return totals, None
    if math.isfinite(totals.loss_sum) and can_lower_loss_scale(run.trainee.optimizer):
        return totals, None  # the optimizer finds the overflow itself, skips the update and lowers the loss scale
    data_size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    is_reduced = monitor is None and data_size > 1
    local_bad = gradient_checks.find_local_bad_gradients(run.trainee.chunks) if is_reduced else None
    ranks = gradient_checks.describe_bad_ranks(
        counted_loss, bool(bad > 0), run.trainee.chunks, describe_rank_samples(run, progress), local_bad
    )
    return totals, non_finite_step(run, progress, ranks)


def non_finite_step(run: Run, progress: Progress, causes: list[str]) -> BadStep:
    """A step with non-finite numbers, from a line for each cause. A loss scale that cannot fall is another cause."""
    loss_scale = current_loss_scale(run.trainee.optimizer)
    scaling = [] if loss_scale is None else [describe_overflow(run.config.optimizer, loss_scale)]
    lines = "\n".join(f"  {line}" for line in [*causes, *scaling])
    return BadStep(NOT_FINITE, f"loss or gradients are not finite ({describe_batch_samples(run, progress)}):\n{lines}")


def find_spike(run: Run, progress: Progress, loss: float, grad_norm: float) -> Optional[BadStep]:
    """The spike of a step's loss or gradient norm, if there is one; None without `--spike-policy`.

    Args:
        progress: before the step.
    """
    if run.spike_detector is None:
        return None
    text = run.spike_detector.find_spike(progress.history.window, loss, grad_norm)
    return None if text is None else BadStep(SPIKE, f"{text} ({describe_batch_samples(run, progress)})")


def describe_batch_samples(run: Run, progress: Progress) -> str:
    """The samples of the next global batch, in words."""
    first = progress.consumed_samples
    return describe_samples(range(first, first + run.global_batch_size))


def describe_rank_samples(run: Run, progress: Progress) -> str:
    """The samples of the next global batch that this rank reads, in words."""
    return describe_samples(
        samples_of_step(
            consumed_samples=progress.consumed_samples,
            micro_batch_size=run.micro_batch_size,
            data_parallel_rank=run.place.data_rank,
            data_parallel_size=run.place.data_size,
            global_batch_size=run.global_batch_size,
        )
    )


# ---- decision --------------------------------------------------------------------------------------------------------


def check_may_skip(run: Run, progress: Progress, bad_step: BadStep) -> None:
    """Return if the update may be skipped.

    Raises:
        NumericsError: `--max-skipped-steps` were skipped in a row, or spikes are not to be skipped.
    """
    training = run.config.training
    is_skippable = bad_step.reason == NOT_FINITE or training.spike_policy == "skip"
    num_before = progress.history.num_in_row
    if is_skippable and num_before < training.max_skipped_steps:
        return
    limit = ""
    if is_skippable and num_before:
        limit = f", after {num_before} consecutive skipped updates (--max-skipped-steps {training.max_skipped_steps})"
    case = Case(run.config, run.place.world_size, machine_problems=machine_problems)
    raise NumericsError(
        f"step {progress.step + 1}: {bad_step.text}\nthe weights were not updated{limit}\nfix: resume from the last "
        f"checkpoint with other data (--override-sample-order), or try one of: {advice(case, for_nonfinite_values)}; a "
        "different schedule needs --override-opt_param-scheduler, a different precision --override-precision"
    )


def is_rollback_allowed(run: Run, progress: Progress) -> bool:
    """Whether a run whose step failed may roll back to a checkpoint."""
    training = run.config.training
    return training.spike_policy == "rollback" and progress.history.num_rollbacks < training.max_rollbacks


# ---- progress --------------------------------------------------------------------------------------------------------


def progress_after_step(
    run: Run, progress: Progress, bad_step: Optional[BadStep], values: Optional[tuple[float, float]]
) -> Progress:
    """The progress after a step.

    Args:
        bad_step: why its update was skipped, if it was.
        values: loss and gradient norm of a step that updated the weights; None where the loss scale overflowed.
    """
    step, consumed, history = progress.step + 1, progress.consumed_samples + run.global_batch_size, progress.history
    if bad_step is not None:
        history = history.after_skip(SkippedSamples(progress.consumed_samples, consumed, step, bad_step.reason))
    elif values is not None:
        window = () if run.spike_detector is None else run.spike_detector.after_update(history.window, *values)
        history = history.after_update(window)
    else:
        history = history.after_overflow()
    return Progress(step, consumed, history)


def progress_after_rollback(run: Run, failed: Progress, loaded: Progress, num_batches: int) -> Progress:
    """The progress after a rollback past some global batches, which count as steps without an update.

    Args:
        failed: before the step that failed.
        loaded: that of the checkpoint.
    """
    end = loaded.consumed_samples + num_batches * run.global_batch_size
    skipped = SkippedSamples(loaded.consumed_samples, end, failed.step + 1, ROLLBACK)
    history = dataclasses.replace(
        loaded.history,
        skipped=(*loaded.history.skipped, skipped),
        num_in_row=0,
        num_rollbacks=failed.history.num_rollbacks + 1,
    )
    return Progress(loaded.step + num_batches, end, history)
