"""The numbers of a record under the names that users of Megatron-LM know from its TensorBoard."""

from __future__ import annotations

from typing import Union

from megafp8.telemetry.records import EvalRecord, StepRecord

EVAL_NAMES = {"valid": "validation", "test": "test"}


def scalars(
    record: Union[StepRecord, EvalRecord], *, with_memory: bool = True, with_timers: bool = True
) -> dict[str, float]:
    """Scalars of one record, without those that were not measured.

    Units: "iteration-time" and the timers in seconds, "throughput" in TFLOP/s of one device, as in Megatron-LM.
    """
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
