"""Numbers in text: fractions as percentages, ratios and counts."""

from __future__ import annotations

import math
from typing import Optional

from megafp8.analysis.seed_statistics import Interval

# Percentages have two decimals: 0.01% is the smallest difference of a loss that the reports show.
DECIMALS = 4
MAX_INTERVAL_RATIO = 10.0
NOT_DETERMINED = "not determined"
"""In place of a ratio whose interval spans more than `MAX_INTERVAL_RATIO`."""
LETTERS = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def percent(fraction: float) -> str:
    """0.005 -> 0.5%."""
    return f"{100 * fraction:g}%"


def signed(fraction: float) -> str:
    """0.00512 -> +0.51%; no sign for zero."""
    value = round(fraction, DECIMALS)
    return f"{value:+.2%}" if value else "0.00%"


def signed_interval(interval: Optional[Interval]) -> str:
    """-0.10% to +0.30%; - without an interval, and for one that is not finite."""
    if interval is None or interval.low is None or interval.high is None or not math.isfinite(interval.mean):
        return "-"
    return f"{signed(interval.low)} to {signed(interval.high)}"


def rounded(fraction: float) -> str:
    """0.00512 -> 0.51%, 0.004 -> 0.4%."""
    return percent(round(fraction, DECIMALS))


def rounded_up(fraction: float) -> str:
    """0.00511 -> 0.52%, 0.004 -> 0.40%: no smaller than the fraction, as a limit must be."""
    units = 10**DECIMALS
    return f"{math.ceil(round(fraction * units, DECIMALS)) / units:.2%}"


def is_wide(low: Optional[float], high: Optional[float]) -> bool:
    """Whether the interval of a positive number spans more than `MAX_INTERVAL_RATIO`; False without an interval."""
    return low is not None and high is not None and (low <= 0 or high > MAX_INTERVAL_RATIO * low)


def count_text(number: float) -> str:
    """1,230,000 as `1.23M`."""
    number = float(f"{number:.3g}")  # first, or 999,999 would be 1e+03k
    return next((f"{number / size:.3g}{letter}" for letter, size in LETTERS if number >= size), f"{number:.3g}")
