"""Short constructors of records."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from megafp8.metrics.records import EvalRecord, QuantizationRecord, RunRecord, StepRecord, TensorStats


@pytest.fixture
def make_run() -> Callable[..., RunRecord]:
    def make(**changes: Any) -> RunRecord:
        fields = {
            "config_hash": "0123456789abcdef",
            "config": {"precision": {"fp8_format": None}},
            "world_size": 2,
            "layout": {"tensor": 1, "data": 2},
            "recipe": "bf16",
            "device_name": "cpu",
        }
        return RunRecord(**(fields | changes))

    return make


@pytest.fixture
def make_step() -> Callable[..., StepRecord]:
    def make(step: int, **changes: Any) -> StepRecord:
        fields = {
            "step": step,
            "consumed_samples": step * 16,
            "consumed_tokens": step * 4096,
            "loss": 4.0,
            "learning_rate": 3e-4,
            "step_ms": 100.0,
            "tokens_per_second": 40960.0,
            "grad_norm": 1.25,
        }
        return StepRecord(**(fields | changes))

    return make


@pytest.fixture
def make_eval() -> Callable[..., EvalRecord]:
    def make(step: int, loss: float = 3.0, **changes: Any) -> EvalRecord:
        fields = {
            "step": step,
            "split": "valid",
            "loss": loss,
            "perplexity": math.exp(loss),
            "num_tokens": 65536,
            "eval_ms": 1500.0,
            "consumed_tokens": step * 4096,
        }
        return EvalRecord(**(fields | changes))

    return make


FC1 = "layers.0.linear_fc1"


@pytest.fixture
def make_statistics() -> Callable[..., QuantizationRecord]:
    """Statistics of a healthy linear, with changes of its input, its weight and its grad_output."""

    def make(
        step: int, of_input: Any = None, of_weight: Any = None, of_gradient: Any = None, **fields: Any
    ) -> QuantizationRecord:
        common = {
            "num_values": 8, "num_non_finite": 0, "amax": 2.0, "quant_scale_min": 224.0, "quant_scale_max": 224.0,
            "scale_spread_octaves": 0.0, "underflow_fraction": 0.0, "saturated_fraction": 0.0, "sqnr_db": 31.5,
            "mean_local_sqnr_db": 31.0, "outlier_octaves": 1.0, "outlier_channel": 3, "exponent_counts": (1, 2, 1, 4),
        }  # fmt: skip
        tensors = {
            f"{FC1}.input": TensorStats(
                **{"format": "e4m3"} | common | {"underflow_fraction": 0.25} | (of_input or {})
            ),
            f"{FC1}.weight": TensorStats(
                **{"format": "e4m3"}
                | common
                | {"update_to_weight": 1e-3, "codes_changed_fraction": 0.02}
                | (of_weight or {}),
            ),
            f"{FC1}.grad_output": TensorStats(**{"format": "e5m2"} | common | (of_gradient or {})),
        }
        return QuantizationRecord(step=step, **{"recipe": "tensorwise", "tensors": tensors} | fields)

    return make
