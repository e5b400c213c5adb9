"""The numbers of a record under the names that users of Megatron-LM know from its TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional, Union

from megafp8.telemetry.records import EvalRecord, QuantizationRecord, StepRecord, TensorStats

EVAL_NAMES = {"valid": "validation", "test": "test"}
OF_TENSORS = ("amax", "num_non_finite", "quant_scale_min", "quant_scale_max", "scale_spread_octaves",
              "underflow_fraction", "saturated_fraction", "sqnr_db", "mean_local_sqnr_db", "staleness_octaves",
              "outlier_octaves", "update_to_weight", "codes_changed_fraction")  # fmt: skip
OF_LOOKS = ("gradient_signal", "gradient_noise", "gradient_noise_scale", "gradient_snr", "update_to_weight",
            "codes_changed_fraction")  # fmt: skip


def scalars(
    record: Union[StepRecord, QuantizationRecord, EvalRecord], *, with_memory: bool = True, with_timers: bool = True
) -> dict[str, float]:
    """Scalars of one record, without those that were not measured: those of tensors under `fp8/FIELD/TENSOR`, those of
    recipes that were tried under `what-if/RECIPE/FIELD/TENSOR`.

    Units: "iteration-time" and the timers in seconds, "throughput" in TFLOP/s of one device, as in Megatron-LM.
    """
    if isinstance(record, QuantizationRecord):
        return dict(_of_look(record))
    if isinstance(record, EvalRecord):
        name = f"lm loss {EVAL_NAMES[record.split]}"
        return {name: record.loss, f"{name} ppl": record.perplexity}
    values = {
        "lm loss": record.loss,
        "learning-rate": record.learning_rate,
        "grad-norm": record.grad_norm,
        "iteration-time": record.step_ms / 1000,
        "tokens-per-second": record.tokens_per_second,
        "throughput": record.model_tflops_per_device,
        "mfu": record.mfu_fraction,
        "loss-scale": record.loss_scale,
        "num-zeros": record.num_zeros_in_grad,
        "params-norm": record.params_norm,
        "param-gather-bytes": record.param_gather_bytes,
    }
    if with_memory:
        values["mem-max-allocated-bytes"] = record.memory_peak_bytes
    if with_timers:
        values |= {f"{name}-time": ms / 1000 for name, ms in (record.timers_ms or {}).items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def _of_look(record: QuantizationRecord) -> Iterator[tuple[str, float]]:
    named = [("fp8", record.tensors), *((f"what-if/{name}", tensors) for name, tensors in record.what_if.items())]
    for prefix, tensors in named:
        for tensor, stats in tensors.items():
            for field in OF_TENSORS:
                if (value := getattr(stats, field)) is not None:
                    yield f"{prefix}/{field}/{tensor}", float(value)
    for field in OF_LOOKS:
        value: Optional[float] = getattr(record, field)
        if value is not None:
            yield f"fp8/{field}", value


def exponent_edges(stats: TensorStats) -> list[float]:
    """Edges of the bins of `exponent_counts`, one more than there are: zeros at -1, subnormals at 0, then the exponent
    fields."""
    return [index - 1.5 for index in range(len(stats.exponent_counts) + 1)]
