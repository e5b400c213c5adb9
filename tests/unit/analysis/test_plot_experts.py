"""The picture of the load of experts, and the names of the worst experts that `plot-statistics` prints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_plot_quantization import make_record, pixels, run_with, stats

from megafp8.analysis.plot_experts import MAX_LINES, grid_of, plot_experts
from megafp8.analysis.runs import LoadedRun
from megafp8.cli.plot_statistics import worst_experts
from megafp8.errors import DataError
from megafp8.metrics.expert_load import ExpertRecord, layer_load


def loaded(num_layers: int, counts: tuple[float, ...] = (4, 3, 1, 0), bias: bool = False) -> LoadedRun:
    load = layer_load(counts, 1, 8, 6.0, 8, (-0.1, 0.2) if bias else None, 16)
    records = tuple(ExpertRecord(step=step, layers={str(n): load for n in range(num_layers)}) for step in (10, 20))
    return LoadedRun(
        name="a", folder=Path("a"), runs=(), stages=(), steps=(), evals=(), events=(), expert_records=records
    )


def test_a_run_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no records of experts"):
        plot_experts(run_with(), tmp_path / "x.png")


@pytest.mark.parametrize("num_layers", [2, MAX_LINES + 1])
def test_the_picture_shows_the_loads(num_layers: int, tmp_path: Path) -> None:
    skewed = pixels(plot_experts(loaded(num_layers), tmp_path / "skewed.png"))
    even = pixels(plot_experts(loaded(num_layers, (2, 2, 2, 2)), tmp_path / "even.png"))
    assert skewed.shape == even.shape and not np.array_equal(skewed, even)
    with_bias = pixels(plot_experts(loaded(num_layers, bias=True), tmp_path / "bias.png"))
    assert with_bias.shape[0] > skewed.shape[0], "two more panels"


def test_missing_layers_are_unknown() -> None:
    run = loaded(2)
    grid = grid_of(run, ["0", "7"], "max_to_mean")
    assert np.array_equal(grid[0], [2, 2]) and np.isnan(grid[1]).all()


def test_the_worst_experts_are_named() -> None:
    tensors = {f"layers.0.experts.{n}.linear_fc1.input": stats(underflow_fraction=0.1 * n) for n in range(3)}
    run = run_with(make_record(7, tensors=tensors))
    (line,) = worst_experts(run, "underflow_fraction", None)
    assert line == (
        "step 7: layers.0.experts.linear_fc1.input: underflow_fraction is worst in expert 2: 0.2, mean of 3 experts 0.1"
    )
    assert not list(worst_experts(run, "amax", None)), "all have the same"
