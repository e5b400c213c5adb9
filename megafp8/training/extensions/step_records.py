"""The record of each step: loss, time, tokens/s, model TFLOP/s, MFU."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Optional

import torch
import torch.distributed as dist

from megafp8.checkpoint.save import sync_parameters
from megafp8.device.gpus import peak_flops
from megafp8.errors import NumericsError
from megafp8.metrics.records import EventRecord, StepRecord
from megafp8.training.extension import Extension, LoopState
from megafp8.training.run import Run
from megafp8.training.run_record import matmul_dtype, model_flops_per_token
from megafp8.training.step import StepResult, params_norm


class StepRecords(Extension):
    """Times steps and records their results; the first record of a step."""

    def open(self, state: LoopState) -> None:
        self.rates = build_rates(state.run)

    def before_step(self, state: LoopState) -> None:
        state.run.timer.start()

    def after_step(self, state: LoopState, result: StepResult) -> None:
        timer, progress = state.run.timer, state.progress
        record = self.rates.record(result, progress.step, progress.consumed_samples, timer.stop(), timer.spans_ms)
        state.sinks.write(with_details(state.run, record, (state.first_step, state.total_steps)))
        if result.finding is not None:
            state.sinks.write(EventRecord(step=state.step, name="step skipped", detail=result.finding.text))

    def recover(self, state: LoopState, error: NumericsError) -> bool:
        """Record the step that failed."""
        state.sinks.write(EventRecord(step=state.step + 1, name="bad numbers", detail=str(error)))
        return False


@dataclass(frozen=True)
class Rates:
    """The constants that turn milliseconds into rates.

    Attributes:
        peak_flops_per_device: dense peak of the linears' dtype; None for a device that is not in the table.
    """

    tokens_per_step: int
    seq_length: int
    flops_per_token: float
    num_devices: int
    peak_flops_per_device: Optional[float]

    def record(
        self, result: StepResult, step: int, consumed_samples: int, step_ms: float, timers_ms: dict[str, float]
    ) -> StepRecord:
        """The record of one step."""
        tokens_per_second = self.tokens_per_step / (step_ms / 1000)
        flops_per_device = tokens_per_second * self.flops_per_token / self.num_devices
        peak = self.peak_flops_per_device
        return StepRecord(
            step=step,
            consumed_samples=consumed_samples,
            consumed_tokens=consumed_samples * self.seq_length,
            loss=result.loss,
            learning_rate=result.learning_rate,
            step_ms=step_ms,
            tokens_per_second=tokens_per_second,
            grad_norm=result.grad_norm,
            model_tflops_per_device=flops_per_device / 1e12,
            mfu_fraction=flops_per_device / peak if peak else None,
            loss_scale=result.loss_scale,
            num_zeros_in_grad=result.num_zeros_in_grad,
            is_skipped=result.is_skipped,
            param_gather_bytes=result.param_gather_bytes,
            timers_ms=timers_ms,
        )


def build_rates(run: Run) -> Rates:
    """The rates of a run. A rank is a device."""
    assert run.config.data.seq_length is not None
    return Rates(
        tokens_per_step=run.global_batch_size * run.config.data.seq_length,
        seq_length=run.config.data.seq_length,
        flops_per_token=model_flops_per_token(run),
        num_devices=run.place.world_size,
        peak_flops_per_device=peak_flops(run.platform.name, matmul_dtype(run.config.precision, run.implementation)),
    )


def with_details(run: Run, record: StepRecord, ends: Collection[int]) -> StepRecord:
    """Add what takes time to find out, at the steps that are logged: memory and the weights' norm. All ranks call it.

    Args:
        ends: the first step of this process and the last of the run, which are logged whatever the interval.
    """
    logging = run.config.logging
    if record.step % logging.log_interval and record.step not in ends:
        return record
    peak = torch.tensor(run.platform.peak_memory_bytes(), dtype=torch.int64, device=run.platform.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    details: dict[str, float] = {"memory_peak_bytes": int(peak)}
    if logging.log_params_norm:
        sync_parameters(run.config, run.trainee)
        details["params_norm"] = params_norm(run)
    return dataclasses.replace(record, **details)
