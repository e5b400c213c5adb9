"""Records with few words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from megafp8.telemetry.records import EvalRecord, RunRecord, StepRecord


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
