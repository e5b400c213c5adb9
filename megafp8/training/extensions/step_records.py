"""The record of each step: loss, time, tokens/s, model TFLOP/s, MFU."""

from __future__ import annotations

import math
from typing import Optional

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megafp8.checkpoint.save import finish_param_gather
from megafp8.config.mixture import has_expert_ranks
from megafp8.device.energy import EnergyCounter, EnergyMeter
from megafp8.device.gpus import peak_flops
from megafp8.errors import NumericsError
from megafp8.mcore.process_groups import is_reduced_over_expert_ranks
from megafp8.metrics.records import EventRecord, StepRecord
from megafp8.metrics.timers import RECORDS
from megafp8.optimizer.fused_adam import clip_factor
from megafp8.quantization.fp8_parameter import QuantizedParameter
from megafp8.training.extension import Extension, LoopState
from megafp8.training.run import Run
from megafp8.training.run_record import matmul_dtype, model_flops_per_token
from megafp8.training.step import StepResult


class StepRecords(Extension):
    """Ends the time of each step and writes its record, before all other records of the step."""

    span = RECORDS

    def open(self, state: LoopState) -> None:
        run, self.reported_operands = state.run, frozenset[str]()
        self.flops_per_token = model_flops_per_token(run)
        # Dense peak of the linears' dtype; None for a device that is not in the table.
        self.peak_flops = peak_flops(run.platform.name, matmul_dtype(run.config.precision, run.implementation))
        self.energy: Optional[EnergyMeter] = None
        if run.config.logging.log_energy:
            self.energy = EnergyMeter(EnergyCounter(run.platform.device), run.platform.device)

    def before_step(self, state: LoopState) -> None:
        self.batch_size = state.run.batch_size_at(state.progress.consumed_samples)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        state.sinks.write(self.record(state, result))
        if result.bad_step is not None:
            state.sinks.write(EventRecord(step=state.step, name="step skipped", detail=result.bad_step.text))
        self.record_nonfinite_operands(state, result)

    def record_nonfinite_operands(self, state: LoopState, result: StepResult) -> None:
        """Record non-finite operands, once while they stay the same, cleared amax histories and high-precision
        fallbacks."""
        nonfinite, operands = result.nonfinite_operands, frozenset(result.nonfinite_operands.non_finite_operands())
        if operands and operands != self.reported_operands:
            state.sinks.write(EventRecord(step=state.step, name="non-finite operands", detail=nonfinite.describe()))
        self.reported_operands = operands
        if nonfinite.infinite_amaxes:
            detail = f"{', '.join(nonfinite.infinite_amaxes)}: an infinite amax would have kept the scale"
            state.sinks.write(EventRecord(step=state.step, name="amax history cleared", detail=detail))
        for linear in () if result.bad_step is None else result.bad_step.fallbacks:
            detail = f"{linear.name} is in high precision from step {state.step + 1} on: {linear.reason}"
            state.sinks.write(EventRecord(step=state.step, name="linear moved", detail=detail))

    def recover(self, state: LoopState, error: NumericsError) -> bool:
        """Record the step that failed."""
        state.sinks.write(EventRecord(step=state.step + 1, name="bad numbers", detail=str(error)))
        return False

    def record(self, state: LoopState, result: StepResult) -> StepRecord:
        """The record of a step; with memory and weight norm, which take time, only if the step is logged.

        Steps are logged at `--log-interval`, and so are the first step of this process and the last of the run.
        """
        run, times = state.run, state.run.timer.end_step()
        num_tokens = self.batch_size * run.seq_length
        tokens_per_second = num_tokens / (times.step_ms / 1000)
        squares = result.metrics.get("document_squares")
        flops_per_token = self.flops_per_token if squares is None else model_flops_per_token(run, squares / num_tokens)
        flops_per_device = tokens_per_second * flops_per_token / run.rank_position.world_size
        ends = (state.first_step, state.total_steps)
        is_logged = state.step % run.config.logging.log_interval == 0 or state.step in ends
        joules, watts, busy = None, None, None
        if self.energy is not None:
            self.energy.tokens += self.batch_size * run.seq_length
            joules, watts, busy = self.energy.read() if is_logged else (None, None, None)
        max_norm, norm = run.config.optimizer.clip_grad, result.grad_norm
        return StepRecord(
            step=state.step,
            consumed_samples=state.progress.consumed_samples,
            consumed_tokens=state.progress.consumed_samples * run.seq_length,
            loss=result.loss,
            learning_rate=result.learning_rate,
            global_batch_size=self.batch_size,
            step_ms=times.step_ms,
            tokens_per_second=tokens_per_second,
            grad_norm=norm,
            clip_factor=None if norm is None else clip_factor(max_norm, norm),
            model_tflops_per_device=flops_per_device / 1e12,
            mfu_fraction=flops_per_device / self.peak_flops if self.peak_flops else None,
            loss_scale=result.loss_scale,
            num_zeros_in_grad=result.num_zeros_in_grad,
            is_skipped=result.is_skipped,
            joules_per_token=joules,
            watts_per_device=watts,
            gpu_busy_fraction=busy,
            timers_ms=times.spans_ms,
            between_ms=times.between_ms or None,
            memory_peak_bytes=max_memory_bytes(run) if is_logged else None,
            params_norm=params_norm(run) if is_logged and run.config.logging.log_params_norm else None,
            **result.metrics,
        )


def max_memory_bytes(run: Run) -> int:
    """The peak memory of the rank that has the highest; all ranks call it."""
    if run.rank_position.world_size == 1:  # the reduction would wait until the device has made its update
        return run.platform.peak_memory_bytes()
    peak = torch.tensor(run.platform.peak_memory_bytes(), dtype=torch.int64, device=run.platform.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    with run.timer.span(None):
        return int(peak)


def params_norm(run: Run) -> float:
    """L2 norm of all weights of the model; all ranks call it. Of FP8 weights it is the norm of their master weights."""
    finish_param_gather(run.config.parallel, run.training_state)
    everywhere = [parameter for chunk in run.training_state.chunks for parameter in chunk.parameters()]
    weights = [
        parameter
        for parameter in everywhere
        if param_is_not_shared(parameter)
        and param_is_not_tensor_parallel_duplicate(parameter)
        and not is_reduced_over_expert_ranks(parameter)
    ]
    complete = [weight.detach().float() for weight in weights if not isinstance(weight, QuantizedParameter)]
    norm = get_grad_norm_fp32(complete, grad_stats_parallel_group=parallel_state.get_model_parallel_group())
    experts = [weight.detach().float() for weight in everywhere if is_reduced_over_expert_ranks(weight)]
    if has_expert_ranks(run.config):
        group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        norm = math.hypot(norm, get_grad_norm_fp32(experts, grad_stats_parallel_group=group))
    if not (run.implementation.emulates and run.config.precision.fp8_param_gather):
        return norm
    quantized = [weight for weight in weights if isinstance(weight, QuantizedParameter)]
    # Master weights are sharded over the same ranks as the gradients.
    group = run.training_state.optimizer.get_grad_stats_parallel_group()
    masters = [(weight.main_param, weight.dtype) for weight in quantized if weight.main_param is not None]
    parts = [part.detach().to(dtype).float() for part, dtype in masters]
    return math.hypot(norm, get_grad_norm_fp32(parts, grad_stats_parallel_group=group))
