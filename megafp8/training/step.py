"""One optimizer step: forward-backward over the microbatches, the check for bad numbers, the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Optional, Union

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from megafp8.checkpoint.progress import Progress
from megafp8.mcore.process_groups import gather_in_next_pass
from megafp8.models.emulated_layers import weights_unchanged
from megafp8.optimizer.fused_adam import FusedAdamOptimizer
from megafp8.optimizer.gradient_checks import StepTotals, agree, bad_ranks, local_bad_gradients
from megafp8.optimizer.schedules import can_fall, current_learning_rate, current_loss_scale
from megafp8.optimizer.skip_update import SkipUpdateOptimizer
from megafp8.quantization.fp8_parameter import QuantizedParameter
from megafp8.resilience import fault_injection
from megafp8.training.bad_steps import BadNumbers, SpikeCheck, check_may_skip, not_finite, samples_of_rank
from megafp8.training.run import Run, to_device_sum

Batches = Optional[Iterator[dict[str, Tensor]]]

SUM_OVERFLOWS = "gradients overflow when those of all ranks are added up"


@dataclass(frozen=True)
class StepResult:
    """What a step reports, the same on all ranks.

    Attributes:
        loss: mean over the tokens of the global batch, before the update.
        grad_norm: global norm before clipping; None where numbers were not finite.
        learning_rate: the one that the update used.
        is_skipped: the weights were left as they are.
        finding: why; None where a loss scale that can fall met an overflow, which is no bad number.
        loss_scale: what the loss was multiplied by; None without a loss scale.
        param_gather_bytes: what this rank got from others of updated weights while the step ran; None where nothing is
            gathered, or a graph gathers.
    """

    loss: float
    grad_norm: Optional[float]
    learning_rate: float
    num_zeros_in_grad: Optional[int]
    is_skipped: bool
    finding: Optional[BadNumbers]
    loss_scale: Optional[float]
    param_gather_bytes: Optional[int]


def train_step(
    run: Run,
    batches: Batches,
    progress: Progress,
    before_update: Callable[[StepTotals], None] = lambda totals: None,
    is_eager: bool = False,
) -> StepResult:
    """Train on one global batch.

    Args:
        batches: this rank's microbatches, None on a pipeline stage that needs none.
        progress: before the step.
        before_update: called between the reduction of the gradients and the update, if there is one.
        is_eager: do not replay a CUDA graph, which would call no hooks.

    Raises:
        NumericsError: the update must not be made and may not be skipped; on all ranks, with the weights as they were.
    """
    trainee = run.trainee
    fault_injection.point("step.begin", step=progress.step + 1)
    clear_gradients(run)
    if run.watch is not None:
        run.watch.reset()
    if run.delayed is not None and run.config.training.max_skipped_steps:
        run.delayed.remember()
    in_one_pass = isinstance(trainee.optimizer, FusedAdamOptimizer)
    with run.timer.span("forward-backward"), run.precision_at(progress.step + 1):
        reports = forward_backward_or_replay(run, batches, is_eager)
        squared_norm = trainee.optimizer.squared_norm() if in_one_pass else None
        fault_injection.point("step.after_backward")
        totals, finding = check_step(run, to_device_sum(reports), progress, squared_norm)

    learning_rate, loss_scale = current_learning_rate(trainee.optimizer), current_loss_scale(trainee.optimizer)
    is_updated, grad_norm, num_zeros = False, None, None
    if finding is None:
        fault_injection.point("step.before_update")
        trainee.wait_for_copies()
        before_update(totals)
        with run.timer.span("optimizer"):
            is_updated, grad_norm, num_zeros, finding = update(run, progress, totals)
        fault_injection.poison("step.weights", next(trainee.chunks[0].parameters()))
        fault_injection.point("step.after_update")
    if is_updated:
        trainee.schedule.step(increment=run.global_batch_size)
    if finding is not None:
        check_may_skip(run, progress, finding)
        if run.delayed is not None:
            run.delayed.restore()
    # megatron-core counts in FP32, so that ranks can add up.
    num_zeros = None if num_zeros is None else int(num_zeros)
    gathered = None if run.traffic is None else run.traffic.take()
    return StepResult(totals.loss, grad_norm, learning_rate, num_zeros, not is_updated, finding, loss_scale, gathered)


def update(
    run: Run, progress: Progress, totals: StepTotals
) -> tuple[bool, Optional[float], Optional[float], Optional[BadNumbers]]:
    """Let the optimizer change the weights, unless loss or gradient norm spike.

    Returns:
        Whether it did, the norm before clipping, the zeros in the gradients if that is asked for, and what was wrong.
    """
    optimizer, check = run.trainee.optimizer, SpikeCheck(run, progress, totals.loss)
    if isinstance(optimizer, FusedAdamOptimizer):
        # The norm was waited for together with the loss.
        if not check.allows(totals.grad_norm):
            return False, totals.grad_norm, None, check.finding
        return *optimizer.step(totals.grad_norm), None
    may_overflow = not run.config.training.check_for_nan_in_loss_and_grad or can_fall(optimizer)
    can_skip = isinstance(optimizer, SkipUpdateOptimizer)
    is_updated, grad_norm, num_zeros = optimizer.step(check.allows) if can_skip else optimizer.step()
    finding = check.finding
    if not is_updated and finding is None and not may_overflow:
        finding = not_finite(run, progress, [SUM_OVERFLOWS])
    return is_updated, grad_norm, num_zeros, finding


def clear_gradients(run: Run) -> None:
    """Clear the gradients, and be ready to sum and reduce new ones."""
    if run.first_gradient is not None:
        run.first_gradient.start()
    else:
        for chunk in run.trainee.chunks:
            chunk.zero_grad_buffer()
    run.trainee.optimizer.zero_grad()


def forward_backward_or_replay(run: Run, batches: Batches, is_eager: bool = False) -> list[dict[str, Tensor]]:
    """Forward-backward of a step, as a CUDA graph where the run has one and the step may use it."""

    def eager(batches: Batches) -> list[dict[str, Tensor]]:
        if run.graph is not None:
            gather_in_next_pass(run.trainee.chunks)
        return forward_backward(run, batches, run.num_microbatches, forward_only=False)

    if run.graph is None or batches is None or is_eager:
        return eager(batches)
    return run.graph.run(eager, batches, run.num_microbatches)


def forward_backward(run: Run, batches: Batches, num_microbatches: int, forward_only: bool) -> list[dict[str, Tensor]]:
    """megatron-core's schedule for the layout; the reports of the loss, on the last stage."""
    chunks = run.trainee.chunks
    schedule = get_forward_backward_func()
    # Emulated layers then quantize each weight once for all microbatches. For others the search is not worth its time.
    with weights_unchanged(chunks) if run.implementation == "emulated" else nullcontext():
        return schedule(
            forward_step_func=run.forward_step,
            data_iterator=batches_of_chunks(run, batches),
            model=chunks,
            num_microbatches=num_microbatches,
            seq_length=run.config.data.seq_length,
            micro_batch_size=run.config.training.micro_batch_size,
            forward_only=forward_only,
        )


def batches_of_chunks(run: Run, batches: Batches) -> Union[Batches, list[Batches]]:
    """Who takes from the batches: with the interleaved schedule the model's first chunk and its last one only.

    A chunk between them that took batches too would take them from the others.
    """
    num_chunks, place = len(run.trainee.chunks), run.place
    if num_chunks == 1:
        return batches
    takers = {0} if place.is_first_stage else set()
    if place.is_last_stage:
        takers.add(num_chunks - 1)
    return [batches if chunk in takers else None for chunk in range(num_chunks)]


def check_step(
    run: Run, local_loss: Optional[Tensor], progress: Progress, squared_norm: Optional[Tensor] = None
) -> tuple[StepTotals, Optional[BadNumbers]]:
    """Agree over all ranks on the loss, and on whether all numbers are finite.

    Args:
        progress: before the step.
        squared_norm: of the gradients that this rank updates with; None where the optimizer takes the norm itself.
    """
    device = run.platform.device
    mine = local_loss if run.place.reports_loss else None
    if mine is not None:
        fault_injection.poison("step.loss", mine[:1])
    bad = torch.zeros((), device=device) if run.watch is None else run.watch.bad
    if run.watch is None and squared_norm is not None:
        bad = (~torch.isfinite(squared_norm)).float()
    totals = agree(mine, bad, device, squared_norm, bool(run.guard.asked))
    run.guard.agree(totals.num_asked_ranks)
    if not totals.num_bad_ranks or not run.config.training.check_for_nan_in_loss_and_grad:
        return totals, None
    if math.isfinite(totals.loss_sum) and can_fall(run.trainee.optimizer):
        return totals, None  # the optimizer will find the overflow, leave out the update and lower the scale
    is_of_sums = run.watch is None and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    own = local_bad_gradients(run.trainee.chunks) if is_of_sums else None
    ranks = bad_ranks(mine, bool(bad > 0), run.trainee.chunks, samples_of_rank(run, progress), own)
    return totals, not_finite(run, progress, ranks)


def params_norm(run: Run) -> float:
    """L2 norm of all weights of the model, over all ranks; of FP8 weights, that of what they are quantized from."""
    weights = [
        parameter
        for chunk in run.trainee.chunks
        for parameter in chunk.parameters()
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
    ]
    complete = [weight.detach().float() for weight in weights if not isinstance(weight, QuantizedParameter)]
    norm = get_grad_norm_fp32(complete, grad_stats_parallel_group=parallel_state.get_model_parallel_group())
    if not (run.implementation == "emulated" and run.config.precision.fp8_param_gather):
        return norm
    quantized = [weight for weight in weights if isinstance(weight, QuantizedParameter)]
    # The ranks that have parts of the master weights are those that have parts of the gradients.
    group = run.trainee.optimizer.get_grad_stats_parallel_group()
    masters = [(weight.main_param, weight.dtype) for weight in quantized if weight.main_param is not None]
    parts = [part.detach().to(dtype).float() for part, dtype in masters]
    return math.hypot(norm, get_grad_norm_fp32(parts, grad_stats_parallel_group=group))
