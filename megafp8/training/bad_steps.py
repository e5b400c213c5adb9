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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional, Union

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megafp8.checkpoint.progress import (
    NOT_FINITE,
    OPERAND,
    ROLLBACK,
    SPIKE,
    HighPrecisionFallback,
    Progress,
    SkippedSamples,
    TrainingState,
)
from megafp8.config.schema import RunConfig
from megafp8.data.loader import describe_samples, samples_of_step
from megafp8.errors import NumericsError
from megafp8.metrics.health_suggestions import for_nonfinite_values, suggestion_text
from megafp8.optimizer import gradient_checks
from megafp8.optimizer.fsdp_checks import ReducedGradientMonitor
from megafp8.optimizer.fused_adam import FusedAdamOptimizer
from megafp8.optimizer.schedules import can_lower_loss_scale, current_loss_scale, describe_overflow
from megafp8.optimizer.skip_update import SpikeDetector
from megafp8.quantization.delayed_scaling import OPERANDS
from megafp8.resilience import fault_injection
from megafp8.training.nonfinite_operands import FORWARD_OPERANDS, MAX_NAMED, NonfiniteOperands
from megafp8.training.run import Run, suggestion_case

ROWS_OF_SUMS = "--use-torch-fsdp2: a rank has rows of sums over ranks, each of which may have brought the value up"
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


def build_gradient_monitor(
    config: RunConfig, training_state: TrainingState, device: torch.device
) -> Union[gradient_checks.NonFiniteGradientMonitor, ReducedGradientMonitor, None]:
    """The check of each rank's local gradients before they are reduced; None where the gradient norm is enough.

    The fused optimizer's norm is enough where every rank holds the complete model, or where there is no data
    parallelism: `find_local_bad_gradients` can then tell afterwards which rank the non-finite values came from.
    """
    data_size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    if not config.training.check_for_nan_in_loss_and_grad:
        return None
    if config.parallel.use_torch_fsdp2:
        return ReducedGradientMonitor(training_state.chunks, device, is_local=config.precision.grad_reduce_in_fp8)
    if isinstance(training_state.optimizer, FusedAdamOptimizer) and data_size in (1, dist.get_world_size()):
        return None
    return gradient_checks.NonFiniteGradientMonitor(training_state.chunks, device)


def build_spike_detector(config: RunConfig) -> Optional[SpikeDetector]:
    """The detector of loss spikes; None without `--spike-policy`."""
    training = config.training
    if training.spike_policy == "off":
        return None
    return SpikeDetector(
        training.spike_window, training.spike_sigma, training.spike_min_steps, training.spike_norm_factor
    )


def reduce_step_totals(
    run: Run,
    local_loss: Optional[Tensor],
    progress: Progress,
    squared_norm: Optional[Tensor] = None,
    depth_sums: Optional[Tensor] = None,
) -> tuple[gradient_checks.StepTotals, Optional[BadStep], NonfiniteOperands]:
    """Reduce the loss of a step over all ranks, and find out whether loss, gradients and operands are finite.

    Args:
        local_loss: (loss sum, tokens) of this rank; None on a rank that computes no loss.
        progress: before the step.
        squared_norm: of the gradient shards that this rank updates with; None where the optimizer takes the norm.
        depth_sums: (loss sum, tokens) of each depth of multi-token prediction on this rank; None without it.
    """
    device, monitor = run.platform.device, run.gradient_monitor
    counted_loss = local_loss if run.rank_position.reports_loss else None
    if counted_loss is not None:
        fault_injection.poison("step.loss", counted_loss[:1])
    bad = torch.zeros((), device=device)
    if squared_norm is not None and not isinstance(monitor, gradient_checks.NonFiniteGradientMonitor):
        bad = (~torch.isfinite(squared_norm)).float()  # of all gradients that this rank has
    elif monitor is not None:
        bad = monitor.bad
    operands = run.operand_monitor
    if depth_sums is not None and not run.rank_position.reports_loss:
        depth_sums = torch.zeros_like(depth_sums)
    totals = gradient_checks.reduce_step_totals(
        counted_loss,
        bad,
        device,
        squared_norm,
        bool(run.watchdog.received_signal),
        None if run.fp8_reduction is None else run.fp8_reduction.counts,
        None if operands is None else operands.local_totals(),
        depth_sums,
    )
    run.watchdog.agree_to_stop(totals.num_stopping_ranks)
    names_saturated = (progress.step + 1) % run.config.logging.log_interval == 0
    nonfinite = NonfiniteOperands() if operands is None else operands.nonfinite_operands(totals, names_saturated)
    if not totals.num_bad_ranks or not run.config.training.check_for_nan_in_loss_and_grad:
        return totals, find_bad_operands(run, progress, nonfinite), nonfinite
    is_loss_finite = math.isfinite(totals.loss_sum)
    if is_loss_finite and can_lower_loss_scale(run.training_state.optimizer):
        # The optimizer finds the overflow itself, skips the update and lowers the loss scale.
        return totals, None, nonfinite
    local_bad = find_local_bad_gradients(run)
    ranks = gradient_checks.describe_bad_ranks(
        counted_loss, bool(bad > 0), run.training_state.chunks, describe_rank_samples(run, progress), local_bad
    )
    if isinstance(monitor, ReducedGradientMonitor) and local_bad is None and is_loss_finite:
        ranks.append(ROWS_OF_SUMS)
    if bad_step := find_bad_operands(run, progress, nonfinite, ranks, is_loss_finite):
        return totals, bad_step, nonfinite
    if nonfinite.non_finite_operands():
        ranks.append(f"operands of quantized linears: {nonfinite.describe()}")
    return totals, non_finite_step(run, progress, ranks), nonfinite


def find_local_bad_gradients(run: Run) -> Optional[set[tuple[int, str]]]:
    """(chunk, name) of the gradients of this rank that were not finite before they were reduced. Collective.

    None if that is not known, or if the monitor read gradients before the reduction.
    """
    monitor = run.gradient_monitor
    if isinstance(monitor, ReducedGradientMonitor):
        return monitor.find_bad_gradients_in_modules()
    if monitor is None and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1:
        return gradient_checks.find_bad_gradients_in_buckets(run.training_state.chunks)
    return None


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
    suggestions = suggestion_text(suggestion_case(run), for_nonfinite_values)
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
    grad_factor: float = 1.0,
) -> Progress:
    """The progress after a step.

    Args:
        bad_step: why its update was skipped, if it was.
        values: loss and gradient norm of a step that updated the weights; None where the loss scale overflowed.
        grad_factor: of the next step.
    """
    step, history = progress.step + 1, progress.history
    consumed = progress.consumed_samples + run.batch_size_at(progress.consumed_samples)
    if bad_step is not None:
        history = history.after_skip(SkippedSamples(progress.consumed_samples, consumed, step, bad_step.reason))
        history = history.after_fallback(bad_step.fallbacks)
    elif values is not None:
        window = () if run.spike_detector is None else run.spike_detector.after_update(history.window, *values)
        history = history.after_update(window)
    else:
        history = history.after_overflow()
    return Progress(step, consumed, history, grad_factor, progress.origin)


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
        warnings=failed.history.warnings,
    )
    return Progress(loaded.step + num_batches, end, history, loaded.grad_factor, loaded.origin)
