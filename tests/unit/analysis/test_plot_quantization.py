"""The picture of a run's quantization statistics."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megafp8.analysis.plot_quantization import FIELDS, forward_order, grid_of, plot_telemetry
from megafp8.analysis.runs import LoadedRun
from megafp8.errors import DataError
from megafp8.metrics.records import QuantizationRecord, TensorStats

NAMES = [f"layers.{layer}.{linear}" for layer in (0, 10, 2) for linear in ("linear_fc2", "linear_qkv")]


def stats(**changes: object) -> TensorStats:
    fields = {"format": "e4m3", "num_values": 8, "num_non_finite": 0, "amax": 2.0, "underflow_fraction": 0.01,
              "exponent_counts": (1, 2, 5)}  # fmt: skip
    return TensorStats(**fields | changes)


def run_with(*records: QuantizationRecord) -> LoadedRun:
    return LoadedRun(
        name="a", folder=Path("a"), runs=(), stages=(), steps=(), evals=(), events=(), quantization_records=records
    )


def make_record(step: int, **changes: object) -> QuantizationRecord:
    tensors = {f"{name}.{operand}": stats() for name in NAMES for operand in ("input", "weight", "grad_output.row")}
    return QuantizationRecord(**{"step": step, "recipe": "blockwise", "tensors": tensors} | changes)


def pixels(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return imread(path)


def test_the_picture_shows_the_field_and_the_recipe(tmp_path: Path) -> None:
    other = {name: stats(underflow_fraction=0.5) for name in make_record(1).tensors}
    run = run_with(make_record(10), make_record(20, what_if={"mxfp8": other}))
    own = pixels(plot_telemetry(run, tmp_path / "own.png"))
    tried = pixels(plot_telemetry(run, tmp_path / "deep" / "tried.png", recipe="mxfp8"))
    same = run_with(make_record(10), make_record(20, what_if={"mxfp8": make_record(1).tensors}))
    plain = pixels(plot_telemetry(same, tmp_path / "plain.png", recipe="mxfp8"))
    assert own.shape[1] == tried.shape[1] == 1500
    assert tried.shape[0] < own.shape[0], "the codes of a recipe that was tried are not recorded"
    assert plain.shape == tried.shape and not np.array_equal(plain, tried)


def test_layers_are_in_the_order_of_the_forward_pass() -> None:
    assert [name.split(".", 1)[1] for name in sorted(NAMES, key=forward_order)] == [
        "0.linear_qkv", "0.linear_fc2", "2.linear_qkv", "2.linear_fc2", "10.linear_qkv", "10.linear_fc2"
    ]  # fmt: skip


def test_experts_follow_attention_and_have_one_row(tmp_path: Path) -> None:
    order = ["layers.0.linear_qkv", "layers.0.linear_proj", "layers.0.experts.linear_fc1",
             "layers.0.experts.linear_fc2", "layers.0.shared_experts.linear_fc1", "layers.1.linear_qkv",
             "output_layer"]  # fmt: skip
    assert sorted(set(order), key=forward_order) == order
    tensors = {f"layers.0.experts.{expert}.linear_fc1.input": stats() for expert in range(64)}
    one = pixels(
        plot_telemetry(run_with(make_record(1, tensors={"layers.0.linear_fc1.input": stats()})), tmp_path / "one.png")
    )
    many = pixels(plot_telemetry(run_with(make_record(1, tensors=tensors)), tmp_path / "many.png"))
    assert many.shape == one.shape


def test_rows_and_columns_are_averaged_without_unknown_numbers() -> None:
    name = NAMES[0]
    tensors = {f"{name}.input.row": stats(sqnr_db=20.0), f"{name}.input.column": stats(sqnr_db=30.0)}
    unknown = {f"{name}.input": stats(sqnr_db=math.inf)}
    grid = grid_of([tensors, unknown, {}], [name], "input", lambda each: each.sqnr_db)
    assert grid[0, 0] == 25 and np.isnan(grid[0, 1:]).all()


def test_missing_fields_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--fp8-log-interval"):
        plot_telemetry(run_with(), tmp_path / "x.png")
    with pytest.raises(DataError, match="nothing of mxfp8; tried: none"):
        plot_telemetry(run_with(make_record(1)), tmp_path / "x.png", recipe="mxfp8")
    with pytest.raises(DataError, match="never knew staleness_octaves"):
        plot_telemetry(run_with(make_record(1)), tmp_path / "x.png", field="staleness_octaves")


@pytest.mark.parametrize("field", FIELDS)
def test_fields_equal_those_of_the_statistics(field: str) -> None:
    assert hasattr(stats(), field)
