"""Multi-token prediction: the quoted code of megatron-core, and its losses on console and in TensorBoard."""

from __future__ import annotations

from pathlib import Path

import megatron.core
import pytest

from megafp8.mcore.multi_token import LOSS_EVIDENCE
from megafp8.metrics.records import StepRecord, from_json, to_json
from megafp8.metrics.sinks.console import describe_steps
from megafp8.metrics.sinks.trackers import scalars

STEP = {"consumed_samples": 8, "consumed_tokens": 64, "loss": 3.0, "learning_rate": 1e-3, "step_ms": 10.0}


@pytest.mark.parametrize(("file", "text"), LOSS_EVIDENCE)
def test_the_code_that_makes_the_class_necessary_is_there(file: str, text: str) -> None:
    assert text in (Path(megatron.core.__file__).parent / file).read_text(encoding="utf-8")


def test_losses_of_each_depth_are_recorded_and_shown() -> None:
    steps = [StepRecord(step=step, tokens_per_second=1.0, mtp_losses=(4.0 + step, 5.0), **STEP) for step in (1, 2)]
    assert from_json(to_json(steps[0])) == steps[0]
    assert "| mtp loss 5.5000 5.0000 |" in describe_steps(steps, show_throughput=False)
    found = scalars(steps[0])
    assert (found["mtp_1 loss"], found["mtp_2 loss"]) == (5.0, 5.0)
