"""The record of each step: loss, time, tokens/s, model TFLOP/s, MFU."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megafp8.checkpoint.save import finish_param_gather
from megafp8.device.gpus import peak_flops
from megafp8.errors import NumericsError
from megafp8.metrics.records import EventRecord, StepRecord
from megafp8.quantization.fp8_parameter import QuantizedParameter
from megafp8.training.extension import Extension, LoopState
from megafp8.training.run import Run
from megafp8.training.run_record import matmul_dtype, model_flops_per_token
from megafp8.training.step import StepResult


class StepRecords(Extension):
    """Times each step and writes its record, before all other records of the step."""

    def open(self, state: LoopState) -> None:
        run = state.run
        self.tokens_per_step = run.global_batch_size * run.seq_length
        self.flops_per_token = model_flops_per_token(run)
        # Dense peak of the linears' dtype; None for a device that is not in the table.
        self.peak_flops = peak_flops(run.platform.name, matmul_dtype(run.config.precision, run.implementation))

    def before_step(self, state: LoopState) -> None:
        state.run.timer.start()

    def after_step(self, state: LoopState, result: StepResult) -> None:
        state.sinks.write(self.record(state, result))
        if result.bad_step is not None:
            state.sinks.write(EventRecord(step=state.step, name="step skipped", detail=result.bad_step.text))

    def recover(self, state: LoopState, error: NumericsError) -> bool:
        """Record the step that failed."""
        state.sinks.write(EventRecord(step=state.step + 1, name="bad numbers", detail=str(error)))
        return False

    def record(self, state: LoopState, result: StepResult) -> StepRecord:
        """The record of a step; with memory and weight norm, which take time, only if the step is logged.

        Steps are logged at `--log-interval`, and so are the first step of this process and the last of the run.
        """
        run, step_ms = state.run, state.run.timer.stop()
        tokens_per_second = self.tokens_per_step / (step_ms / 1000)
        flops_per_device = tokens_per_second * self.flops_per_token / run.place.world_size
        ends = (state.first_step, state.total_steps)
        is_logged = state.step % run.config.logging.log_interval == 0 or state.step in ends
        return StepRecord(
            step=state.step,
            consumed_samples=state.progress.consumed_samples,
            consumed_tokens=state.progress.consumed_samples * run.seq_length,
            loss=result.loss,
            learning_rate=result.learning_rate,
            step_ms=step_ms,
            tokens_per_second=tokens_per_second,
            grad_norm=result.grad_norm,
            model_tflops_per_device=flops_per_device / 1e12,
            mfu_fraction=flops_per_device / self.peak_flops if self.peak_flops else None,
            loss_scale=result.loss_scale,
            num_zeros_in_grad=result.num_zeros_in_grad,
            is_skipped=result.is_skipped,
            param_gather_bytes=result.param_gather_bytes,
            timers_ms=run.timer.spans_ms,
            memory_peak_bytes=max_memory_bytes(run) if is_logged else None,
            params_norm=params_norm(run) if is_logged and run.config.logging.log_params_norm else None,
        )


def max_memory_bytes(run: Run) -> int:
    """The peak memory of the rank that has the highest; all ranks call it."""
    peak = torch.tensor(run.platform.peak_memory_bytes(), dtype=torch.int64, device=run.platform.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak)


def params_norm(run: Run) -> float:
    """L2 norm of all weights of the model; all ranks call it. Of FP8 weights it is the norm of their master weights."""
    finish_param_gather(run.config, run.trainee)
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
    # Master weights are sharded over the same ranks as the gradients.
    group = run.trainee.optimizer.get_grad_stats_parallel_group()
    masters = [(weight.main_param, weight.dtype) for weight in quantized if weight.main_param is not None]
    parts = [part.detach().to(dtype).float() for part, dtype in masters]
    return math.hypot(norm, get_grad_norm_fp32(parts, grad_stats_parallel_group=group))
