"""The command line of tools/plot_telemetry.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.analysis import plot_quantization
from megafp8.cli import plot_statistics
from megafp8.metrics.records import EventRecord, QuantizationRecord, RunRecord, TensorStats
from megafp8.metrics.sinks import JsonlSink


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with one statistics record and one finding."""
    stats = TensorStats(format="e5m2", num_values=4, num_non_finite=0, amax=1.0, underflow_fraction=0.1)
    sink = JsonlSink(tmp_path / "records.jsonl")
    sink.write(RunRecord(config_hash="0", config={}, world_size=1, layout={}, recipe="fp8", device_name="cpu"))
    sink.write(QuantizationRecord(step=5, recipe="mxfp8", tensors={"layers.0.linear_fc1.grad_output.row": stats}))
    sink.write(EventRecord(step=5, name="health", detail="gradients underflow: try: this"))
    sink.close()
    return tmp_path


def test_picture_and_findings(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_statistics.main([str(run), "--output-dir", str(run / "report")]) == 0
    assert (run / "report" / "telemetry.png").stat().st_size > 10_000
    assert capsys.readouterr().out == "step 5: gradients underflow: try: this\n"


def test_a_recipe_that_was_not_tried(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_statistics.main([str(run), "--recipe", "nvfp4"]) == 66
    assert "has nothing of nvfp4" in capsys.readouterr().err


def test_the_tool_offers_the_existing_fields() -> None:
    assert plot_statistics.FIELDS == plot_quantization.FIELDS
