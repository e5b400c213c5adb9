import struct

import numpy as np
import pytest

from megafp8.analysis.pairing import Pair
from megafp8.analysis.plot_comparison import HEIGHT_PIXELS, WIDTH_PIXELS, DrawnRecipe, color_of, plot_loss_curves
from megafp8.analysis.runs import load_runs
from megafp8.errors import DataError


def drawn(folders) -> list[DrawnRecipe]:
    """A recipe for each run, the first being the baseline."""
    runs = load_runs(folders)
    colors = [color_of(run.name, index - 1, is_baseline=index == 0) for index, run in enumerate(runs)]
    return [
        DrawnRecipe(name=run.name, pairs=(Pair(runs[0], run),), color=color)
        for run, color in zip(runs, colors, strict=True)
    ]


@pytest.mark.parametrize("num_runs", [1, 2, 3])
def test_png_size(write_run, tmp_path, num_runs: int) -> None:
    folders = [
        write_run(f"run{i}", np.linspace(9, 3 + i, 60).tolist(), validations={30: 6.0, 60: 3.0 + i})
        for i in range(num_runs)
    ]
    path = plot_loss_curves(drawn(folders), tmp_path / "new" / "curves.png", "A title")
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (WIDTH_PIXELS, HEIGHT_PIXELS)


@pytest.mark.parametrize("losses", [[3.0], [float("nan")] * 5, [3.0, float("inf"), 2.0]])
def test_unusual_runs_are_drawn(write_run, tmp_path, losses, recwarn) -> None:
    runs = drawn([write_run("a", losses), write_run("b", losses[:1])])
    assert plot_loss_curves(runs, tmp_path / "curves.png", "A title").exists()
    assert [str(warning.message) for warning in recwarn] == []


def test_nothing_to_draw_is_an_error(write_run, tmp_path) -> None:
    runs = drawn([write_run("a", [1.0]), write_run("b")])
    with pytest.raises(DataError, match="run b .* no step records"):
        plot_loss_curves(runs, tmp_path / "curves.png", "A title")
