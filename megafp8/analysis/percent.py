"""Fractions as percentages in text."""

from __future__ import annotations

import math
from typing import Optional

from megafp8.analysis.seed_statistics import Interval

# Percentages have two decimals: 0.01% is the smallest difference of a loss that the reports show.
DECIMALS = 4


def percent(fraction: float) -> str:
    """0.005 -> 0.5%."""
    return f"{100 * fraction:g}%"


def signed(fraction: float) -> str:
    """0.00512 -> +0.51%; no minus sign for zero."""
    return f"{round(fraction, DECIMALS) + 0.0:+.2%}"


def signed_interval(interval: Optional[Interval]) -> str:
    """-0.10% to +0.30%; - without an interval, and for one that is not finite."""
    if interval is None or interval.low is None or interval.high is None or not math.isfinite(interval.mean):
        return "-"
    return f"{signed(interval.low)} to {signed(interval.high)}"


def rounded(fraction: float) -> str:
    """0.00512 -> 0.51%, 0.004 -> 0.4%."""
    return percent(round(fraction, DECIMALS))


def rounded_up(fraction: float) -> str:
    """0.00512 -> 0.52%: no smaller than the fraction, as a limit must be."""
    units = 10**DECIMALS
    return percent(math.ceil(round(fraction * units, DECIMALS)) / units)
