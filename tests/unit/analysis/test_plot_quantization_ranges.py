"""The picture of a tensor's values in the formats' ranges."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from megafp8.analysis.plot_quantization import COLORS, FormatRange, Panel, plot_ranges
from megafp8.errors import DataError

FORMATS = [FormatRange(name="E4M3", normal_octaves=14.8, subnormal_octaves=17.8)]


def picture(panels: list[Panel], tmp_path: Path) -> np.ndarray:
    """The pixels, [height, width, 3] from 0 to 255."""
    path = plot_ranges(panels, FORMATS, tmp_path / "deep" / "picture.png")
    return (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)


def columns_of(pixels: np.ndarray, color: str) -> np.ndarray:
    """The horizontal positions of a color in the picture."""
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)])
    below_legend = pixels[pixels.shape[0] // 4 :]
    blended = (wanted * 0.85 + 255 * 0.15).round()
    return np.flatnonzero((np.abs(below_legend - blended).max(axis=2) <= 3).any(axis=0))


def test_smaller_values_are_drawn_further_left(tmp_path: Path) -> None:
    counts = {"large": [1000, 5000, 1000], "small": [0] * 20 + [1000, 5000, 1000]}
    pixels = picture([Panel(title="x", counts=counts)], tmp_path)
    large, small = (columns_of(pixels, color) for color in COLORS[:2])
    assert len(large) and len(small)
    assert small.min() < large.min() - 100


def test_empty_tensors_and_single_values_are_drawn(tmp_path: Path) -> None:
    assert picture([Panel(title="zeros", counts={"a": [0, 0]}), Panel(title="one", counts={"a": [1]})], tmp_path).size


def test_the_number_of_panels_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megafp8.analysis.plot_quantization.MAX_PANELS", 2)
    panels = [Panel(title=str(i), counts={"a": [1, 2]}) for i in range(5)]
    full = picture(panels[:2], tmp_path)
    assert picture(panels, tmp_path).shape == full.shape


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tensor"):
        plot_ranges([], FORMATS, tmp_path / "picture.png")
