"""Comparison of recipes: validation loss, speed and memory of runs against a baseline.

Each run is compared with the baseline's run of the same seed, which has the same initial weights and the same samples
in the same order. The comparison lists the settings that differ, and warns if the runs did not see the same tokens or
changed their settings. With several seeds, a gap has a confidence interval and a verdict against a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Optional

import numpy as np

from megafp8.analysis import pairing, seed_statistics
from megafp8.analysis.pairing import Pair, RecipeRuns, is_control, recipe_of, seed_of
from megafp8.analysis.runs import LoadedRun, Unfinished
from megafp8.analysis.seed_statistics import BEYOND, CONFIDENCE, CONTROL, UNDECIDED, Interval
from megafp8.errors import DataError

WARMUP_STEPS = 10
BOUND_FRACTION = 0.005
# Part of the steps, at the end, over which training losses are averaged.
LAST_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One run. Gap and speed ratio are against the baseline's run of the same seed, whose own are 0 and 1.

    An unfinished run without a validation has None for its validation results. The gap is None, too, if the baseline's
    run has no validation.
    """

    name: str
    recipe: str
    steps: int
    """Up to the last validation; all steps without one."""
    consumed_tokens: int
    validation_loss: Optional[float]
    relative_gap_fraction: Optional[float]
    """(loss - baseline's loss) / baseline's loss; negative is better than the baseline."""
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
class TaskRow:
    """Scores of a task (`--eval-tasks`) at the last validation, means over the seeds."""

    bits_per_byte: float
    gap: Interval
    """Of the bits per byte to the baseline's run of the same seed, as a fraction."""
    accuracy: Optional[float] = None
    normalized_accuracy: Optional[float] = None


@dataclass(frozen=True, kw_only=True)
class RecipeRow:
    """One recipe over the seeds that it shares with the baseline; without such seeds its results are None."""

    name: str
    recipe: str = "-"
    seeds: tuple[int, ...] = ()
    num_missing: int = 0
    """Seeds that are unfinished, or that the baseline lacks."""
    num_unfinished: int = 0
    """Runs that are not done, with or without figures."""
    num_diverged: int = 0
    """Runs that ended with non-finite numbers or a loss spike."""
    gaps_fraction: tuple[float, ...] = ()
    """Of the final validation loss, one for each seed with a validation."""
    gap: Optional[Interval] = None
    training_gap: Optional[Interval] = None
    """Of the training loss over the last tenth of the steps; None without common steps."""
    other_data: tuple[str, ...] = ()
    """What differs from the baseline in the data or their order, such as "training data"; then there is no verdict."""
    verdict: str = ""
    """`within`, `beyond`, `not decided` or `control`; empty for the baseline."""
    validation_loss: Optional[float] = None
    """Mean over the seeds, like the following fields."""
    training_loss: Optional[float] = None
    perplexity: Optional[float] = None
    """exp of that mean loss."""
    tokens_per_second: Optional[float] = None
    speed_ratio: Optional[float] = None
    equal_loss_tokens: Optional[Interval] = None
    """Tokens for the same validation loss over the baseline's (`seed_statistics.equal_loss_ratio`); None for the
    baseline, and unless every pair has a ratio."""
    equal_loss_time: Optional[Interval] = None
    """Time in steps for the same validation loss over the baseline's."""
    model_tflops_per_device: Optional[float] = None
    memory_peak_bytes: Optional[int] = None
    """Maximum over the seeds."""
    grad_norm: Optional[float] = None
    steps: Optional[int] = None
    consumed_tokens: Optional[int] = None
    tasks: Mapping[str, TaskRow] = field(default_factory=dict)
    """By name, those that all pairs have."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All recipes and all runs, including the baseline."""

    baseline: str
    bound_fraction: float
    confidence: float
    warmup_steps: int
    recipes: tuple[RecipeRow, ...]
    rows: tuple[ComparisonRow, ...]
    differences: tuple[str, ...]
    """Settings that differ from the baseline, as "recipe: section.setting: baseline's value -> its own value"."""
    unfinished: tuple[Unfinished, ...]
    warnings: tuple[str, ...]
    """Unfinished runs, and why numbers may not be comparable."""

    @property
    def drawn(self) -> tuple[RecipeRow, ...]:
        """The recipes that have results, and so appear in the figures."""
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
        baseline: name of the run or recipe to compare with; default the first.
        warmup_steps: step records at the start that are ignored for the speed (at most half of a run's).
        bound_fraction: accepted relative gap of the validation loss.
        confidence: of the intervals over the seeds.
        unfinished: unfinished runs of the recipes; those with figures are also among the runs.

    Raises:
        DataError: there are no runs, a finished run has no validation, or the baseline is unknown or unfinished.
    """
    if not runs:
        raise DataError(f"nothing to compare: {'; '.join(map(str, unfinished)) or 'give at least one run folder'}")
    unfinished_names = {each.name for each in unfinished}
    for run in runs:
        if run.name not in unfinished_names:
            _ = run.final_validation  # raises without a validation
    groups = pairing.group_runs(runs)
    base = find_baseline(groups, baseline, unfinished)
    missing_of_base = _unfinished_of(base, unfinished)
    is_baseline_done = not missing_of_base and not num_diverged(base.runs, missing_of_base)

    def complete(
        row: RecipeRow, own: Sequence[LoadedRun], missing: Sequence[Unfinished], num_missing: int
    ) -> RecipeRow:
        """The row with its runs that have no result, and with its verdict."""
        row = replace(
            row, num_missing=num_missing, num_unfinished=len(missing), num_diverged=num_diverged(own, missing)
        )  # fmt: skip
        is_base = row.name == base.name
        return row if is_base else replace(row, verdict=verdict_of(row, bound_fraction, is_baseline_done))

    recipes: list[RecipeRow] = []
    rows: list[ComparisonRow] = []
    warnings = [str(each) for each in unfinished]
    unknown = list(unfinished)  # of recipes without a run to compare
    for group in groups:
        pairs, missing = pairing.pairs_of(base, group), _unfinished_of(group, unfinished)
        group_rows = [_row(pair, warmup_steps) for pair in pairs]
        num_missing = len(group.runs) - len(pairs) + sum(not each.has_figures for each in missing)
        recipes.append(complete(_recipe_row(group, pairs, group_rows, confidence), group.runs, missing, num_missing))
        rows += group_rows
        unknown = [each for each in unknown if each not in missing]
        warnings += _seed_warnings(base, group, pairs)
        warnings += [text for run in group.runs for text in (*pairing.change_warnings(run), *pairing.undrawn(run))]
        warnings += [text for pair in pairs for text in pairing.data_warnings(pair)]
        warnings += [
            f"{row.name} left its weights as they were in {row.skipped_steps} of its steps"
            for row in group_rows
            if row.skipped_steps
        ]
    for name in dict.fromkeys(each.recipe for each in unknown):
        missing = [each for each in unfinished if each.recipe == name]
        recipes.append(complete(RecipeRow(name=name), (), missing, len(missing)))
    return Comparison(
        baseline=base.name,
        bound_fraction=bound_fraction,
        confidence=confidence,
        warmup_steps=warmup_steps,
        recipes=tuple(recipes),
        rows=tuple(rows),
        differences=tuple(text for group in groups if group is not base for text in _setting_texts(base, group)),
        unfinished=tuple(unfinished),
        warnings=tuple(warnings),
    )


def find_baseline(
    recipes: Sequence[RecipeRuns], baseline: Optional[str], unfinished: Sequence[Unfinished] = ()
) -> RecipeRuns:
    """The recipe with this name, or with a run of this name; without a name the first.

    The last part of a folder name is enough if it is unique.

    Raises:
        DataError: there is no such recipe, more than one, or no finished run of it.
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


def _unfinished_of(recipe: RecipeRuns, unfinished: Sequence[Unfinished]) -> list[Unfinished]:
    names = {run.name for run in recipe.runs}
    return [each for each in unfinished if each.recipe in recipe.folders | {recipe.name} or each.name in names]


def _row(pair: Pair, warmup_steps: int) -> ComparisonRow:
    run, final, base = pair.run, pair.run.last_validation, pair.base.last_validation
    last = final or run.steps[-1]
    speed, base_speed = (median_after_warmup(each, "tokens_per_second", warmup_steps) for each in (run, pair.base))
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
        memory_peak_bytes=run.memory_peak_bytes,
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
    training_gaps = [value for value in map(last_training_gap, pairs) if value is not None]
    has_all_gaps = len(training_gaps) == len(pairs)
    return RecipeRow(
        name=recipe.name,
        recipe=recipe.text,
        seeds=tuple(row.seed for row in rows),
        gaps_fraction=gaps,
        gap=seed_statistics.mean_interval(gaps, confidence) if gaps else None,
        training_gap=seed_statistics.mean_interval(training_gaps, confidence) if has_all_gaps else None,
        other_data=pairing.other_data(pairs),
        validation_loss=loss,
        training_loss=_mean([row.training_loss for row in rows]),
        perplexity=None if loss is None else float(np.exp(loss)),
        tokens_per_second=_mean([row.tokens_per_second for row in rows]),
        speed_ratio=_mean([row.speed_ratio for row in rows]),
        equal_loss_tokens=_equal_loss(pairs, seed_statistics.validation_losses, confidence),
        equal_loss_time=_equal_loss(pairs, seed_statistics.validation_losses_over_time, confidence),
        model_tflops_per_device=_mean([row.model_tflops_per_device for row in rows]),
        memory_peak_bytes=max((row.memory_peak_bytes for row in rows if row.memory_peak_bytes), default=None),
        grad_norm=_mean([row.grad_norm for row in rows]),
        steps=min(row.steps for row in rows),
        consumed_tokens=min(row.consumed_tokens for row in rows),
        tasks=_task_rows(pairs, confidence),
    )


def _task_rows(pairs: Sequence[Pair], confidence: float) -> dict[str, TaskRow]:
    """The scores of the tasks that all pairs have, with as many questions."""
    last = [(pair.run.last_validation, pair.base.last_validation) for pair in pairs]
    scores = [tuple((record and record.tasks) or {} for record in both) for both in last]
    rows = {}
    sizes = [{name: task.num_questions for name, task in each.items()} for both in scores for each in both]
    for name in (name for name in sizes[0] if all(each.get(name) == sizes[0][name] for each in sizes)):
        own, base = ([each[side][name] for each in scores] for side in (0, 1))
        bits = [each.bits_per_byte for each in own]
        gaps = [ours / theirs.bits_per_byte - 1 for ours, theirs in zip(bits, base, strict=True)]
        rows[name] = TaskRow(
            bits_per_byte=float(np.mean(bits)), gap=seed_statistics.mean_interval(gaps, confidence),
            accuracy=_mean([each.accuracy for each in own]),
            normalized_accuracy=_mean([each.normalized_accuracy for each in own]),
        )  # fmt: skip
    return rows


def _equal_loss(
    pairs: Sequence[Pair], points: Callable[[LoadedRun], tuple[np.ndarray, np.ndarray]], confidence: float
) -> Optional[Interval]:
    """Ratio of tokens or time at equal loss; None for the baseline itself, and unless every pair has one."""
    ratios = [seed_statistics.equal_loss_ratio(pair, points) for pair in pairs if pair.run is not pair.base]
    known = [ratio for ratio in ratios if ratio]
    return seed_statistics.ratio_interval(known, confidence) if known and len(known) == len(ratios) else None


def num_diverged(runs: Sequence[LoadedRun], unfinished: Sequence[Unfinished]) -> int:
    """Number of runs that were stopped because they diverged, or whose last validation loss is not finite."""
    stopped = {each.name for each in unfinished if each.is_diverged}
    last = {run.name: run.last_validation for run in runs}
    return len(stopped | {name for name, record in last.items() if record and not math.isfinite(record.loss)})


def verdict_of(row: RecipeRow, bound_fraction: float, is_baseline_done: bool) -> str:
    """Whether a recipe's gap stays within the bound.

    A diverged run is beyond any bound. Otherwise there is no verdict with unfinished runs, without a pair, or if the
    data differ.
    """
    if is_control(row.name):
        return CONTROL
    if row.num_diverged:
        return BEYOND
    if row.num_unfinished or not is_baseline_done or row.gap is None or row.other_data:
        return UNDECIDED
    return seed_statistics.gap_verdict(row.gap, bound_fraction)


def last_training_loss(run: LoadedRun) -> Optional[float]:
    """Mean over the last tenth of the steps; None without any."""
    losses = run.series("loss")
    return float(np.mean(losses[-max(1, round(len(losses) * LAST_FRACTION)) :])) if len(losses) else None


def last_training_gap(pair: Pair) -> Optional[float]:
    """Relative gap of the mean training losses over the last tenth of the common steps; None without common steps."""
    in_run, in_base = seed_statistics.common_steps(pair.base, pair.run)
    if not len(in_run):
        return None
    last = -max(1, round(len(in_run) * LAST_FRACTION))
    base = float(np.mean(pair.base.series("loss")[in_base][last:]))
    return (float(np.mean(pair.run.series("loss")[in_run][last:])) - base) / base


def median_after_warmup(run: LoadedRun, field: str, warmup_steps: int) -> Optional[float]:
    """Median of a field over the steps after warm-up; None without values."""
    values = run.series(field)[min(warmup_steps, len(run.steps) // 2) :]
    values = values[np.isfinite(values)]
    return float(np.median(values)) if values.size else None


def _mean(values: Sequence[Optional[float]]) -> Optional[float]:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return float(np.mean(known)) if known else None


def _setting_texts(base: RecipeRuns, recipe: RecipeRuns) -> list[str]:
    is_single = len(base.runs) == len(recipe.runs) == 1
    texts = pairing.differences(base.runs[0].info, recipe.runs[0].info, with_seed=is_single)
    return [f"{recipe.name}: {text}" for text in texts]


def _seed_warnings(base: RecipeRuns, recipe: RecipeRuns, pairs: Sequence[Pair]) -> list[str]:
    texts, paired = [], [pair.run for pair in pairs]
    if left_out := [run.name for run in recipe.runs if run not in paired]:
        texts.append(f"{', '.join(left_out)}: the baseline {base.name} has no run of that seed, so left out")
    if 0 < len(pairs) < len(base.runs):
        texts.append(
            f"{recipe.name} has {len(pairs)} of the {len(base.runs)} seeds of {base.name}: its gap is one of "
            "pairs, but its mean losses are of other seeds than the baseline's"
        )
    return texts
