"""The loop under accelerate trains the model of the shape."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.accelerate_loop import build_model, measure, run_of
from megafp8.config import model_shapes


@pytest.mark.parametrize("shape", ["llama3.2-1b", "gpt2-124m"])
def test_the_model_is_that_of_the_shape(shape: str) -> None:
    config = run_of(shape)
    with torch.device("meta"):
        model = build_model(config)
    count = model_shapes.count_parameters(config.model, model.config.vocab_size)
    assert sum(parameter.numel() for parameter in model.parameters()) == count.total


def test_a_step_has_all_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    result = measure("tiny", "bf16", 0, 1)
    assert result["linears"] == {"torch": 15}  # seven in each of two layers, and the output layer
    assert result["tokens_per_s"] == pytest.approx(1e3 * 2 * 64 / result["step_ms"])
    assert result["loss"] == pytest.approx(6.27, abs=0.2)  # ln 512
