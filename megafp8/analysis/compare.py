"""Runs side by side: what another recipe costs in loss and gains in speed.

The comparison is only as good as its pairing: a run is held against the baseline's run of the same seed, which had the
same initial weights and the same samples in the same order. So it also says in which settings they differ, and warns
when they did not see the same tokens or changed on the way. Over several seeds there is an interval, and a verdict
against a bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

import numpy as np

from megafp8.analysis.pairing import (
    Pair,
    RecipeRuns,
    change_warnings,
    data_warnings,
    differences,
    group_runs,
    is_control,
    other_data,
    pairs_of,
    recipe_of,
    seed_of,
)
from megafp8.analysis.runs import LoadedRun, Unfinished
from megafp8.analysis.seed_statistics import BEYOND, CONFIDENCE, CONTROL, UNDECIDED, Interval, judge, mean_interval
from megafp8.errors import DataError

WARMUP_STEPS = 10
BOUND_FRACTION = 0.005
# The end of training over which the mean gap of the training losses is taken.
LAST_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One run. Gap and ratio are against the baseline's run of the same seed, whose own are 0 and 1.

    What a validation gives is None of a run that is not done and was not validated yet, and its gap also where the
    baseline's run was not.
    """

    name: str
    recipe: str
    steps: int
    """Before the last validation; all of them without one."""
    consumed_tokens: int
    validation_loss: Optional[float]
    relative_gap_fraction: Optional[float]
    """(loss - baseline's loss) / baseline's loss: negative is better than the baseline."""
    perplexity: Optional[float]
    tokens_per_second: Optional[float]
    """Median over the steps after warm-up; None for a run without step records."""
    speed_ratio: Optional[float]
    model_tflops_per_device: Optional[float]
    memory_peak_bytes: Optional[int]
    seed: int = 0
    training_loss: Optional[float] = None
    """Mean over the last tenth of the steps; None without step records."""
    grad_norm: Optional[float] = None
    """Median over the steps after warm-up, before clipping."""
    skipped_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class RecipeRow:
    """One recipe over the seeds that it shares with the baseline; without any, there are no figures (None)."""

    name: str
    recipe: str = "-"
    seeds: tuple[int, ...] = ()
    num_missing: int = 0
    """Seeds that are not done, or that the baseline lacks."""
    gaps_fraction: tuple[float, ...] = ()
    """Of the final validation loss, one a seed that has one."""
    gap: Optional[Interval] = None
    training_gap: Optional[Interval] = None
    """Of the training loss over the last tenth of the steps; None also without common steps."""
    other_data: tuple[str, ...] = ()
    """In what its data, or their order, are not the baseline's: "training data", "seed". Then nothing is decided."""
    verdict: str = ""
    """`within`, `beyond`, `not decided` or `control`; empty for the baseline."""
    validation_loss: Optional[float] = None
    """Mean over the seeds, as all that follows."""
    training_loss: Optional[float] = None
    perplexity: Optional[float] = None
    """exp of that loss."""
    tokens_per_second: Optional[float] = None
    speed_ratio: Optional[float] = None
    model_tflops_per_device: Optional[float] = None
    memory_peak_bytes: Optional[int] = None
    """The largest of any seed."""
    grad_norm: Optional[float] = None
    steps: Optional[int] = None
    consumed_tokens: Optional[int] = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All recipes and all runs, the baseline's among them."""

    baseline: str
    bound_fraction: float
    confidence: float
    warmup_steps: int
    recipes: tuple[RecipeRow, ...]
    rows: tuple[ComparisonRow, ...]
    differences: tuple[str, ...]
    """Settings in which a recipe differs from the baseline, as "name: section.setting: baseline's -> its own"."""
    unfinished: tuple[Unfinished, ...]
    warnings: tuple[str, ...]
    """Which runs are not done, and why the numbers may not be comparable."""

    @property
    def drawn(self) -> tuple[RecipeRow, ...]:
        """The recipes that have figures."""
        return tuple(row for row in self.recipes if row.seeds)

    @property
    def has_gaps(self) -> bool:
        """Whether any recipe has a gap to the baseline."""
        return any(row.gap is not None and row.name != self.baseline for row in self.recipes)


def compare_runs(
    runs: Sequence[LoadedRun],
    *,
    baseline: Optional[str] = None,
    warmup_steps: int = WARMUP_STEPS,
    bound_fraction: float = BOUND_FRACTION,
    confidence: float = CONFIDENCE,
    unfinished: Sequence[Unfinished] = (),
) -> Comparison:
    """Compare runs by their last validation and their speed.

    Args:
        baseline: name of the run or recipe that the others are held against; default the first.
        warmup_steps: step records at the start that do not count for the speed (at most half of a run's).
        bound_fraction: relative gap of the validation loss that is accepted.
        confidence: of the intervals over the seeds.
        unfinished: runs that belong to the recipes and are not done; those with figures are among the runs.

    Raises:
        DataError: no runs, an unknown baseline or one of which no run is done, a run that is done and was never
            validated, or no pair of one seed.
    """
    if not runs:
        raise DataError(f"nothing to compare: {'; '.join(map(str, unfinished)) or 'give at least one run folder'}")
    going_on = {each.name for each in unfinished}
    for run in runs:
        if run.name not in going_on:
            _ = run.final_validation  # raises where there is none
    groups = group_runs(runs)
    base = find_baseline(groups, baseline, unfinished)
    missing_of_base = _of_recipe(base, unfinished)
    recipes: list[RecipeRow] = []
    rows: list[ComparisonRow] = []
    warnings = [str(each) for each in unfinished]
    for group in groups:
        pairs, missing = pairs_of(base, group), _of_recipe(group, unfinished)
        of_group = [_row(pair, warmup_steps) for pair in pairs]
        recipe = _recipe_row(group, pairs, of_group, confidence)
        verdict = "" if group is base else verdict_of(recipe, pairs, bound_fraction, missing, missing_of_base)
        left_out = len(group.runs) - len(pairs) + sum(not each.has_figures for each in missing)
        recipes.append(replace(recipe, verdict=verdict, num_missing=left_out))
        rows += of_group
        warnings += _warnings_of_seeds(base, group, pairs)
        warnings += [text for run in group.runs for text in change_warnings(run)]
        warnings += [text for pair in pairs for text in _warnings(pair)]
        warnings += [
            f"{row.name} left its weights as they were in {row.skipped_steps} of its steps"
            for row in of_group
            if row.skipped_steps
        ]
    known = {each for group in groups for each in _of_recipe(group, unfinished)}
    for name in dict.fromkeys(each.recipe for each in unfinished if each not in known):
        missing = [each for each in unfinished if each.recipe == name]
        recipe = RecipeRow(name=name, num_missing=len(missing))
        recipes.append(replace(recipe, verdict=verdict_of(recipe, (), bound_fraction, missing, missing_of_base)))
    return Comparison(
        baseline=base.name,
        bound_fraction=bound_fraction,
        confidence=confidence,
        warmup_steps=warmup_steps,
        recipes=tuple(recipes),
        rows=tuple(rows),
        differences=tuple(text for group in groups if group is not base for text in _of_settings(base, group)),
        unfinished=tuple(unfinished),
        warnings=tuple(warnings),
    )


def find_baseline(
    recipes: Sequence[RecipeRuns], baseline: Optional[str], unfinished: Sequence[Unfinished] = ()
) -> RecipeRuns:
    """The recipe of that name, or with the run of that name; the first without a name. Of a recipe in namesake folders
    the last part is enough where it is the only one.

    Raises:
        DataError: there is none, or several, or none that is done.
    """
    if baseline is None:
        return recipes[0]
    for recipe in recipes:
        if baseline == recipe.name or baseline in [run.name for run in recipe.runs]:
            return recipe
    namesakes = [recipe for recipe in recipes if recipe.name.endswith(f"/{baseline}")]
    if len(namesakes) == 1:
        return namesakes[0]
    if namesakes:
        raise DataError(f"baseline {baseline!r} may be {' or '.join(recipe.name for recipe in namesakes)}: give one")
    if reasons := [each.reason for each in unfinished if baseline in (each.recipe, each.name)]:
        raise DataError(f"no run of {baseline}, which the others are held against, is done: {reasons[0]}")
    raise DataError(f"baseline {baseline!r} is none of the runs; they are {', '.join(r.name for r in recipes)}")


def _of_recipe(recipe: RecipeRuns, unfinished: Sequence[Unfinished]) -> list[Unfinished]:
    names = {run.name for run in recipe.runs}
    return [each for each in unfinished if each.recipe in recipe.folders | {recipe.name} or each.name in names]


def _row(pair: Pair, warmup_steps: int) -> ComparisonRow:
    run, final, base = pair.run, pair.run.last_validation, pair.base.last_validation
    last = final or run.steps[-1]
    speed, base_speed = (median_after_warmup(one, "tokens_per_second", warmup_steps) for one in (run, pair.base))
    return ComparisonRow(
        name=run.name,
        recipe=recipe_of(run),
        steps=last.step,
        consumed_tokens=last.consumed_tokens,
        validation_loss=final.loss if final else None,
        relative_gap_fraction=(final.loss - base.loss) / base.loss if final and base else None,
        perplexity=final.perplexity if final else None,
        tokens_per_second=speed,
        speed_ratio=speed / base_speed if speed and base_speed else None,
        model_tflops_per_device=median_after_warmup(run, "model_tflops_per_device", warmup_steps),
        memory_peak_bytes=max((r.memory_peak_bytes for r in run.steps if r.memory_peak_bytes), default=None),
        seed=seed_of(run),
        training_loss=last_training_loss(run),
        grad_norm=median_after_warmup(run, "grad_norm", warmup_steps),
        skipped_steps=sum(record.is_skipped for record in run.steps),
    )


def _recipe_row(
    recipe: RecipeRuns, pairs: Sequence[Pair], rows: Sequence[ComparisonRow], confidence: float
) -> RecipeRow:
    if not pairs:
        return RecipeRow(name=recipe.name, recipe=recipe.text)
    gaps = tuple(row.relative_gap_fraction for row in rows if row.relative_gap_fraction is not None)
    losses = [row.validation_loss for row in rows if row.validation_loss is not None]
    loss = float(np.mean(losses)) if losses else None
    ends = [value for value in map(last_training_gap, pairs) if value is not None]
    return RecipeRow(
        name=recipe.name,
        recipe=recipe.text,
        seeds=tuple(row.seed for row in rows),
        gaps_fraction=gaps,
        gap=mean_interval(gaps, confidence) if gaps else None,
        training_gap=mean_interval(ends, confidence) if len(ends) == len(pairs) else None,
        other_data=other_data(pairs),
        validation_loss=loss,
        training_loss=_mean([row.training_loss for row in rows]),
        perplexity=None if loss is None else float(np.exp(loss)),
        tokens_per_second=_mean([row.tokens_per_second for row in rows]),
        speed_ratio=_mean([row.speed_ratio for row in rows]),
        model_tflops_per_device=_mean([row.model_tflops_per_device for row in rows]),
        memory_peak_bytes=max((row.memory_peak_bytes for row in rows if row.memory_peak_bytes), default=None),
        grad_norm=_mean([row.grad_norm for row in rows]),
        steps=min(row.steps for row in rows),
        consumed_tokens=min(row.consumed_tokens for row in rows),
    )


def verdict_of(
    row: RecipeRow,
    pairs: Sequence[Pair],
    bound_fraction: float,
    missing: Sequence[Unfinished],
    missing_of_base: Sequence[Unfinished],
) -> str:
    """Whether a recipe's gap stays within the bound.

    Where runs are missing, those that are there say nothing of one that failed; one that diverged is beyond any bound.
    Nothing is decided either where runs were last validated after other steps than the baseline's, or had other data.
    """
    if is_control(row.name):
        return CONTROL
    if missing or missing_of_base:
        return BEYOND if any(each.is_diverged for each in missing) else UNDECIDED
    is_even = not row.other_data and all(
        pair.run.final_validation.consumed_tokens == pair.base.final_validation.consumed_tokens for pair in pairs
    )
    if row.gap is None or (not is_even and math.isfinite(row.gap.mean)):
        return UNDECIDED
    return judge(row.gap, bound_fraction)


def last_training_loss(run: LoadedRun) -> Optional[float]:
    """Mean over the last tenth of the steps; None without any."""
    losses = run.series("loss")
    return float(np.mean(losses[-max(1, round(len(losses) * LAST_FRACTION)) :])) if len(losses) else None


def last_training_gap(pair: Pair) -> Optional[float]:
    """Relative gap of the mean training losses over the last tenth of the steps that both made."""
    _, ours, theirs = np.intersect1d(pair.run.series("step"), pair.base.series("step"), return_indices=True)
    if not len(ours):
        return None
    last = -max(1, round(len(ours) * LAST_FRACTION))
    base = float(np.mean(pair.base.series("loss")[theirs][last:]))
    return (float(np.mean(pair.run.series("loss")[ours][last:])) - base) / base


def median_after_warmup(run: LoadedRun, field: str, warmup_steps: int) -> Optional[float]:
    """Over the steps after warm-up."""
    values = run.series(field)[min(warmup_steps, len(run.steps) // 2) :]
    values = values[np.isfinite(values)]
    return float(np.median(values)) if values.size else None


def _mean(values: Sequence[Optional[float]]) -> Optional[float]:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return float(np.mean(known)) if known else None


def _of_settings(base: RecipeRuns, recipe: RecipeRuns) -> list[str]:
    is_single = len(base.runs) == len(recipe.runs) == 1
    texts = differences(base.runs[0].info, recipe.runs[0].info, with_seed=is_single)
    return [f"{recipe.name}: {text}" for text in texts]


def _warnings_of_seeds(base: RecipeRuns, recipe: RecipeRuns, pairs: Sequence[Pair]) -> list[str]:
    texts, paired = [], [pair.run for pair in pairs]
    if left_out := [run.name for run in recipe.runs if run not in paired]:
        texts.append(f"{', '.join(left_out)}: the baseline {base.name} has no run of that seed, so left out")
    if 0 < len(pairs) < len(base.runs):
        texts.append(
            f"{recipe.name} has {len(pairs)} of the {len(base.runs)} seeds of {base.name}: its gap is one of "
            "pairs, but its mean losses are of other seeds than the baseline's"
        )
    return texts


def _warnings(pair: Pair) -> list[str]:
    ours, theirs = pair.run.last_validation, pair.base.last_validation
    texts = []
    if ours is not None and theirs is not None and ours.consumed_tokens != theirs.consumed_tokens:
        texts.append(
            f"{pair.run.name} was last validated after {ours.consumed_tokens:,} tokens, {pair.base.name} after "
            f"{theirs.consumed_tokens:,}: the gap is not one of the recipe alone"
        )
    return texts + data_warnings(pair)
