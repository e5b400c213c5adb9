"""Run folders made from a few numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import pytest

from megafp8.metrics.records import EvalRecord, RunRecord, StepRecord
from megafp8.metrics.sinks.jsonl import JsonlSink

TOKENS_PER_STEP = 1000


def run_writer(root: Path) -> Callable[..., Path]:
    """A function that writes a run's records below a folder; appends to existing ones. It returns the run's folder."""

    def write(
        name: str,
        losses: Sequence[float] = (),
        *,
        validations: Optional[dict[int, float]] = None,
        first_step: int = 1,
        speeds: Optional[Sequence[float]] = None,
        step_fields: Optional[dict[str, Any]] = None,
        num_eval_tokens: int = 500,
        **run_fields: Any,
    ) -> Path:
        fields = {
            "config_hash": "00",
            "config": {"precision": {"fp8_format": None}, "checkpoint": {"save": name}},
            "world_size": 1,
            "layout": {"data": 1},
            "recipe": "bf16",
            "device_name": "cpu",
        }
        sink = JsonlSink(root / name / "records.jsonl")
        sink.write(RunRecord(**(fields | run_fields)))
        for index, loss in enumerate(losses):
            step = first_step + index
            sink.write(
                StepRecord(
                    step=step,
                    consumed_samples=step,
                    consumed_tokens=step * TOKENS_PER_STEP,
                    loss=loss,
                    learning_rate=1e-3,
                    step_ms=10.0,
                    tokens_per_second=speeds[index] if speeds else 100.0,
                    **(step_fields or {}),
                )
            )
        for step, loss in (validations or {}).items():
            sink.write(
                EvalRecord(
                    step=step,
                    split="valid",
                    loss=loss,
                    perplexity=math.exp(loss),
                    num_tokens=num_eval_tokens,
                    eval_ms=1.0,
                    consumed_tokens=step * TOKENS_PER_STEP,
                )
            )
        sink.close()
        return root / name

    return write


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes runs into the test's folder."""
    return run_writer(tmp_path)


@pytest.fixture(scope="module")
def write_shared_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes runs that the tests of a file share."""
    return run_writer(tmp_path_factory.mktemp("shared"))
