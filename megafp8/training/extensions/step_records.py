"""From a step's result and time to its record: tokens/s, model TFLOP/s, MFU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from megafp8.device.peaks import peak_flops
from megafp8.telemetry.records import StepRecord
from megafp8.training.assemble import Run
from megafp8.training.run_record import matmul_dtype, model_flops_per_token
from megafp8.training.step import StepResult


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
