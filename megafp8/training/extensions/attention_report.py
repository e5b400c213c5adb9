"""Report of the attention kernels that ran, after the first step."""

from __future__ import annotations

from pathlib import Path

import torch

from megafp8.config import derived
from megafp8.config.precision_schedule import is_quantized_at
from megafp8.errors import CapabilityError
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks import Sinks
from megafp8.models.layer_runtime import layer_runtime
from megafp8.training.extension import Extension, LoopState
from megafp8.training.run import Run
from megafp8.training.step import StepResult


class AttentionReport(Extension):
    """Records the attention kernels of this process's first step."""

    def after_step(self, state: LoopState, result: StepResult) -> None:
        if state.step == state.first_step:
            report_attention(state.run, state.sinks, state.step)


def report_attention(run: Run, sinks: Sinks, step: int) -> None:
    """Record the attention kernels that ran, and refuse a fallback to slow ones.

    Raises:
        CapabilityError: Transformer Engine fell back to unfused attention, or from FP8 to BF16.
    """
    if run.implementation.has_torch_attention:
        sinks.write(EventRecord(step=step, name="attention", detail="torch SDPA"))
        return
    chosen = layer_runtime(run.implementation).attention_kernel()
    if chosen is None:
        return
    sinks.write(EventRecord(step=step, name="attention", detail=f"Transformer Engine {chosen}"))
    precision = run.config.precision
    has_faster_kernels = derived.params_dtype(precision) != "fp32"  # fused and flash attention have no FP32
    if chosen == "unfused" and precision.attention_backend == "auto" and has_faster_kernels:
        cudnn = Path(torch.__file__).parents[1] / "nvidia/cudnn"
        cause = f"The usual cause is a second cuDNN on the system: export CUDNN_HOME={cudnn}"
        if precision.deterministic_mode and run.config.data.reset_attention_mask:
            cause = (
                "Deterministic attention of documents needs memory for documents x heads x length^2, and there are too "
                "many: remove --deterministic-mode"
            )
        raise CapabilityError(
            "Transformer Engine fell back to unfused attention, which is about 30% slower and needs far more memory. "
            f"{cause}. For the reason, set NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2. To accept it: --attention-backend unfused"
        )
    if precision.fp8_dot_product_attention and is_quantized_at(precision, step) and not chosen.endswith(", FP8)"):
        raise CapabilityError(
            f"--fp8-dot-product-attention: Transformer Engine uses {chosen}; unset NVTE_DPA_FP8_RECIPE. For the "
            "reason, set NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2"
        )
