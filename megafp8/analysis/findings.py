"""The findings of a report in sentences: what the losses and their intervals show about each recipe.

Every case has one sentence here. Terminal, Markdown, JSON and HTML show the same sentences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Optional

from megafp8.analysis.compare import Comparison, RecipeRow
from megafp8.analysis.percent import rounded_up, signed
from megafp8.analysis.seed_statistics import CONTROL


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Relative difference of a recipe's validation loss from the baseline's; positive is worse.

    Attributes:
        mean: finite.
        low, high: interval of the mean; None with one seed.
        sample: what the interval is computed from, such as "3 seeds".
    """

    name: str
    mean: float
    low: Optional[float]
    high: Optional[float]
    sample: str


def headline(comparison: Comparison) -> str:
    """The findings of a comparison. The control is left out, unless nothing else is compared."""
    base = next(row for row in comparison.recipes if row.name == comparison.baseline)
    others = [row for row in comparison.recipes if row is not base]
    rows = [row for row in others if row.verdict != CONTROL] or others
    if not rows:
        return f"There is no baseline: {base.name} is the only recipe."
    sentences = [f"{row.name} diverged{_share_of_runs(row.num_diverged, row)}." for row in rows if row.num_diverged]
    rows = [row for row in rows if not row.num_diverged]
    if rows and (base.num_diverged or base.num_unfinished):
        return " ".join([*sentences, _without_baseline(base, rows)])
    done = [row for row in rows if not row.num_unfinished]
    comparable = [row for row in done if row.gap is not None and not row.other_data]
    sentences = difference_sentences(list(map(_difference, comparable)), base.name) + sentences
    sentences += [_incomparable(row, base.name) for row in done if row not in comparable]
    return " ".join([*sentences, *(_unfinished(row) for row in rows if row.num_unfinished)])


def difference_sentences(differences: Sequence[Difference], baseline: str) -> list[str]:
    """What the intervals of the differences show: no difference, better or worse; without intervals what was seen."""
    found = [each for each in differences if each.low is not None and each.high is not None]
    equal = [each for each in found if each.low == each.high == 0]
    unclear = [each for each in found if each not in equal and _ends(each)[0] <= 0 <= _ends(each)[1]]
    clear = [each for each in found if each not in (*equal, *unclear)]
    groups = (
        (f"Same validation loss as {baseline}", equal),
        ("No difference found", unclear),
        ("Better", [each for each in clear if each.mean < 0]),
        ("Worse", [each for each in clear if each.mean > 0]),
    )
    sentences = []
    for verdict, rows in groups:
        for sample, group in groupby(sorted(rows, key=lambda each: each.sample), key=lambda each: each.sample):
            shown = ", ".join(each.name if each in equal else _with_interval(each) for each in group)
            against = "" if rows is equal else f", against {baseline}"
            sentences.append(f"{verdict}: {shown} ({sample}{against}).")
    if seen := [f"{each.name} {signed(each.mean)}" for each in differences if each not in found]:
        sentences.append(f"One seed, so no interval: {', '.join(seen)} (against {baseline}).")
    return sentences


def _with_interval(difference: Difference) -> str:
    """The name, the mean and half the width of its interval: fp8 +0.06% ±0.92%."""
    low, high = _ends(difference)
    return f"{difference.name} {signed(difference.mean)} \u00b1{rounded_up((high - low) / 2)}"


def _ends(difference: Difference) -> tuple[float, float]:
    assert difference.low is not None and difference.high is not None
    return difference.low, difference.high


def _difference(row: RecipeRow) -> Difference:
    assert row.gap is not None and math.isfinite(row.gap.mean)
    sample = f"{len(row.gaps_fraction)} seeds"
    return Difference(name=row.name, mean=row.gap.mean, low=row.gap.low, high=row.gap.high, sample=sample)


def _without_baseline(base: RecipeRow, rows: Sequence[RecipeRow]) -> str:
    state, num_runs = ("diverged", base.num_diverged) if base.num_diverged else ("is unfinished", base.num_unfinished)
    names = _listed([row.name for row in rows])
    return f"The baseline {base.name} {state}{_share_of_runs(num_runs, base)}: there is no finding on {names}."


def _incomparable(row: RecipeRow, baseline: str) -> str:
    if row.other_data:
        return f"{row.name} and {baseline} cannot be compared: they differ in {_listed(row.other_data)}."
    return f"{row.name} and {baseline} cannot be compared: they have no seed in common."


def _unfinished(row: RecipeRow) -> str:
    so_far = f"; the difference so far is {signed(row.gap.mean)}" if row.gap is not None else ""
    return f"{row.name} is unfinished{_share_of_runs(row.num_unfinished, row)}: there is no finding yet{so_far}."


def _share_of_runs(number: int, row: RecipeRow) -> str:
    """ " in 1 of 3 runs"; empty for a recipe with one run."""
    num_runs = len(row.seeds) + row.num_missing
    return f" in {number} of {num_runs} runs" if num_runs > 1 else ""


def _listed(words: Sequence[str]) -> str:
    """ "a, b and c"."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
