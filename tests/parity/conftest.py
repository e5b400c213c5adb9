"""The trainings on one rank that layouts are compared with, each run once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ranks import run_ranks
from small_run import PLAIN, Curve, curve_of, small_config

NUM_STEPS = 20

CurveOf = Callable[[str], Curve]


@pytest.fixture(scope="session")
def one_rank() -> CurveOf:
    """By style: the FP32 training on one rank that every layout must follow."""
    curves: dict[str, Curve] = {}

    def curve(style: str) -> Curve:
        if style not in curves:
            curves[style] = run_ranks(1, curve_of, small_config(style, PLAIN), NUM_STEPS)[0]
        return curves[style]

    return curve
