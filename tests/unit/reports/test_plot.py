import struct

import numpy as np
import pytest

from megafp8.errors import DataError
from megafp8.reports.load import load_run, load_runs
from megafp8.reports.plot import HEIGHT_PIXELS, WIDTH_PIXELS, plot_loss_curves, relative_gap, smooth, validation_gap


def slow_smooth(values, window: int, keeps_width: bool):
    half = window // 2
    means = []
    for i in range(len(values)):
        before, after = min(half, i), min(half, len(values) - 1 - i)
        if not keeps_width:
            before = after = min(before, after)
        part = [value for value in values[i - before : i + after + 1] if np.isfinite(value)]
        means.append(np.mean(part) if part else np.nan)
    return means


@pytest.mark.parametrize("keeps_width", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5, 50])
def test_smooth_against_a_plain_loop(window: int, keeps_width: bool) -> None:
    values = np.random.default_rng(0).normal(size=23)
    values[[3, 4, 5, 20]] = [np.nan, np.inf, -np.inf, np.nan]
    np.testing.assert_allclose(
        smooth(values, window, keeps_width=keeps_width), slow_smooth(values, window, keeps_width), rtol=1e-12
    )


def test_a_straight_line_stays_straight_to_its_ends() -> None:
    line = np.linspace(9.0, 1.0, 30)
    np.testing.assert_allclose(smooth(line, 9), line)
    assert smooth(np.array([]), 5).shape == (0,)


def test_gaps_are_taken_at_common_steps(write_run) -> None:
    base = load_run(write_run("a", [4.0, 2.0, 1.0, 1.0], validations={2: 2.0, 4: 1.0}))
    run = load_run(write_run("b", [2.2, 0.9], first_step=2, validations={3: 7.0, 4: 1.5}))
    tokens, gap = relative_gap(base, run)
    assert tokens.tolist() == [2000, 3000]
    np.testing.assert_allclose(gap, [0.1, -0.1])
    tokens, gap = validation_gap(base, run)
    assert (tokens.tolist(), gap.tolist()) == ([4000], [0.5])


@pytest.mark.parametrize("num_runs", [1, 2, 3])
def test_a_png_of_the_promised_size(write_run, tmp_path, num_runs: int) -> None:
    folders = [
        write_run(f"run{i}", np.linspace(9, 3 + i, 60).tolist(), validations={30: 6.0, 60: 3.0 + i})
        for i in range(num_runs)
    ]
    path = plot_loss_curves(load_runs(folders), tmp_path / "new" / "curves.png", title="A title")
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (WIDTH_PIXELS, HEIGHT_PIXELS)


@pytest.mark.parametrize("losses", [[3.0], [float("nan")] * 5, [3.0, float("inf"), 2.0]])
def test_odd_runs_are_drawn_too(write_run, tmp_path, losses, recwarn) -> None:
    runs = load_runs([write_run("a", losses), write_run("b", losses[:1])])
    assert plot_loss_curves(runs, tmp_path / "curves.png").exists()
    assert [str(warning.message) for warning in recwarn] == []


def test_nothing_to_draw_is_an_error(write_run, tmp_path) -> None:
    runs = load_runs([write_run("a", [1.0]), write_run("b")])
    with pytest.raises(DataError, match="run b .* no step records"):
        plot_loss_curves(runs, tmp_path / "curves.png")
    with pytest.raises(DataError, match="baseline 'x'"):
        plot_loss_curves(runs[:1], tmp_path / "curves.png", baseline="x")
