"""Slopes of activations over the width, their verdicts, and the figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from megafp8.analysis.coordinates import (
    FLAT,
    GROWS,
    MUP,
    NO_SLOPE,
    SHRINKS,
    STANDARD,
    UNDECIDED,
    Coordinate,
    as_text,
    fit_slopes,
    plot_coordinates,
    slope_table,
    verdict_lines,
)
from megafp8.analysis.plotting import save_figure


def rows(parametrization: str, exponents: Sequence[float], initial: float = 0.0) -> list[Coordinate]:
    """Two steps of two activations: their changes have a given slope for each seed, their first sizes another."""
    return [
        Coordinate("bf16", parametrization, seed, width, step, name, width**initial, width**slope * (step == 2))
        for seed, slope in enumerate(exponents, 1)
        for width in (64, 128, 256)
        for step in (1, 2)
        for name in ("embedding", "logits")
    ]


@pytest.mark.parametrize(
    ("exponents", "initial", "verdict"),
    [
        ((0.01, -0.02, 0.03), 0.0, FLAT),
        ((0.01, -0.02, 0.03), 0.5, GROWS),
        ((0.95, 1.0, 1.05), 0.0, GROWS),
        ((-0.45, -0.5, -0.55), 0.0, SHRINKS),
        ((-0.6, 0.0, 0.6), 0.0, UNDECIDED),
        ((0.0,), 0.0, UNDECIDED),
        ((0.0, math.nan, 0.0), 0.0, NO_SLOPE),
    ],
)
def test_verdicts(exponents: Sequence[float], initial: float, verdict: str) -> None:
    for slope in fit_slopes(rows(MUP, exponents, initial)):
        assert slope.verdict == verdict
        if verdict != NO_SLOPE:
            assert slope.change.mean == pytest.approx(sum(exponents) / len(exponents))
            assert slope.size.mean == pytest.approx(initial)


def test_initial_sizes_may_shrink_in_logits_only() -> None:
    """Those of muP vanish in the limit."""
    verdicts = {slope.activation: slope.verdict for slope in fit_slopes(rows(MUP, (0.01, -0.02, 0.03), -0.5))}
    assert verdicts == {"embedding": SHRINKS, "logits": FLAT}


def test_table_and_lines() -> None:
    both = fit_slopes([*rows(STANDARD, (0.9, 1.0, 1.1)), *rows(MUP, (-0.01, 0.0, 0.01))])
    assert verdict_lines(both) == [
        "bf16, standard: grows: embedding, logits",
        "bf16, muP: flat within the noise of the seeds",
    ]
    # Student's t for 95% with 2 degrees of freedom is 4.303; the standard error is 0.1 / sqrt(3).
    assert as_text(both[0].change) == "+1.00 +- 0.25"
    assert len(slope_table(both).splitlines()) == 2 + 4


def test_the_figure_has_a_panel_for_each_activation_and_parametrization(tmp_path: Path) -> None:
    figure = plot_coordinates([*rows(STANDARD, (1.0, 1.1)), *rows(MUP, (0.0, 0.1))], "bf16")
    assert [axes.get_title("left") for axes in figure.axes] == ["embedding", "logits", "", ""]
    assert all([line.get_label() for line in axes.lines] == ["step 1", "step 2"] for axes in figure.axes)
    assert save_figure(figure, tmp_path / "bf16.svg").stat().st_size > 1000
