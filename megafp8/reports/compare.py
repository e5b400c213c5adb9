"""Runs side by side: what another recipe costs in loss and gains in speed.

The comparison is only as good as its pairing, so it also says in which settings the runs differ, and warns when
they did not see the same number of tokens.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from megafp8.errors import DataError
from megafp8.reports.load import Run

WARMUP_STEPS = 10
MIB = 2**20
# Where a run writes and how it logs has no part in what it learns.
SECTIONS_WITHOUT_EFFECT = ("checkpoint", "logging")


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One run. Gap and ratio are against the baseline, whose own are 0 and 1."""

    name: str
    recipe: str
    steps: int
    consumed_tokens: int
    validation_loss: float
    relative_gap_fraction: float
    """(loss - baseline's loss) / baseline's loss: negative is better than the baseline."""
    perplexity: float
    tokens_per_second: Optional[float]
    """Median over the steps after warm-up; None for a run without step records."""
    speed_ratio: Optional[float]
    model_tflops_per_device: Optional[float]
    memory_peak_bytes: Optional[int]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows, the baseline's among them."""

    baseline: str
    warmup_steps: int
    rows: tuple[ComparisonRow, ...]
    differences: tuple[str, ...]
    """Settings in which a run differs from the baseline, as "name: section.setting: baseline's -> its own"."""
    warnings: tuple[str, ...]
    """Why the numbers may not be comparable."""

    def to_text(self) -> str:
        """For a terminal: columns in line, then differences and warnings."""
        header, cells = self._cells()
        widths = [max(len(row[column]) for row in [header, *cells]) for column in range(len(header))]
        lines = [_align(header, widths), "  ".join("-" * width for width in widths)]
        lines += [_align(row, widths) for row in cells]
        return "\n".join(lines + self._remarks(indent=""))

    def to_markdown(self) -> str:
        """The same as a Markdown table and list."""
        header, cells = self._cells()
        rule = ["---" if column < 2 else "---:" for column in range(len(header))]
        lines = [f"| {' | '.join(row)} |" for row in [header, rule, *cells]]
        return "\n".join(lines + self._remarks(indent="- ")) + "\n"

    def to_json(self) -> str:
        """All fields; numbers that are not finite become null."""
        return json.dumps(_without_non_finite(dataclasses.asdict(self)), indent=2, allow_nan=False) + "\n"

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        columns = {
            "run": [row.name for row in self.rows],
            "recipe": [row.recipe for row in self.rows],
            "validation loss": [f"{row.validation_loss:.4f}" for row in self.rows],
            "gap": [self._gap(row) for row in self.rows],
            "perplexity": [f"{row.perplexity:.2f}" for row in self.rows],
            "tokens/s": [_optional(row.tokens_per_second, "{:,.0f}") for row in self.rows],
            "speed": [_optional(row.speed_ratio, "{:.2f}x") for row in self.rows],
            "TFLOP/s per device": [_optional(row.model_tflops_per_device, "{:.3g}") for row in self.rows],
            "peak MiB": [
                _optional(row.memory_peak_bytes and row.memory_peak_bytes / MIB, "{:,.0f}") for row in self.rows
            ],
            "steps": [f"{row.steps}" for row in self.rows],
            "tokens": [f"{row.consumed_tokens:,}" for row in self.rows],
        }
        shown = {name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)}
        return list(shown), [list(row) for row in zip(*shown.values(), strict=True)]

    def _gap(self, row: ComparisonRow) -> str:
        return "baseline" if row.name == self.baseline else f"{row.relative_gap_fraction:+.2%}"

    def _remarks(self, *, indent: str) -> list[str]:
        lines = [f"{indent}{text}" for text in self.differences]
        lines += [f"{indent}Warning: {text}" for text in self.warnings]
        return ["", *lines] if lines else []


def compare_runs(
    runs: Sequence[Run], *, baseline: Optional[str] = None, warmup_steps: int = WARMUP_STEPS
) -> Comparison:
    """Compare runs by their last validation and their speed.

    Args:
        baseline: name of the run that the others are held against; default the first.
        warmup_steps: step records at the start that do not count for the speed (at most half of a run's).

    Raises:
        DataError: no runs, an unknown baseline, or a run without validation.
    """
    if not runs:
        raise DataError("nothing to compare: give at least one run folder")
    base = _find_baseline(runs, baseline)
    base_loss = base.final_validation.loss
    base_speed = _median_speed(base, warmup_steps)
    rows = []
    for run in runs:
        final = run.final_validation
        speed = _median_speed(run, warmup_steps)
        rows.append(
            ComparisonRow(
                name=run.name,
                recipe=run.info.recipe,
                steps=final.step,
                consumed_tokens=final.consumed_tokens,
                validation_loss=final.loss,
                relative_gap_fraction=(final.loss - base_loss) / base_loss,
                perplexity=final.perplexity,
                tokens_per_second=speed,
                speed_ratio=speed / base_speed if speed and base_speed else None,
                model_tflops_per_device=_median_after_warmup(run, "model_tflops_per_device", warmup_steps),
                memory_peak_bytes=max((r.memory_peak_bytes for r in run.steps if r.memory_peak_bytes), default=None),
            )
        )
    others = [run for run in runs if run is not base]
    return Comparison(
        baseline=base.name,
        warmup_steps=warmup_steps,
        rows=tuple(rows),
        differences=tuple(text for run in others for text in _differences(base, run)),
        warnings=tuple(text for run in others for text in _warnings(base, run)),
    )


def _find_baseline(runs: Sequence[Run], baseline: Optional[str]) -> Run:
    if baseline is None:
        return runs[0]
    for run in runs:
        if run.name == baseline:
            return run
    raise DataError(f"baseline {baseline!r} is none of the runs; they are {', '.join(run.name for run in runs)}")


def _median_speed(run: Run, warmup_steps: int) -> Optional[float]:
    return _median_after_warmup(run, "tokens_per_second", warmup_steps)


def _median_after_warmup(run: Run, field: str, warmup_steps: int) -> Optional[float]:
    values = run.series(field)[min(warmup_steps, len(run.steps) // 2) :]
    values = values[np.isfinite(values)]
    return float(np.median(values)) if values.size else None


def _differences(base: Run, run: Run) -> list[str]:
    ours, theirs = _flatten(run.info.config), _flatten(base.info.config)
    names = [name for name in (theirs | ours) if ours.get(name) != theirs.get(name)]
    texts = [f"{run.name}: {name}: {theirs.get(name)} -> {ours.get(name)}" for name in names]
    if run.info.device_name != base.info.device_name or run.info.world_size != base.info.world_size:
        texts.append(
            f"{run.name}: devices: {base.info.world_size} x {base.info.device_name} -> "
            f"{run.info.world_size} x {run.info.device_name}"
        )
    return texts


def _flatten(config: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for section, settings in config.items():
        if section in SECTIONS_WITHOUT_EFFECT:
            continue
        if isinstance(settings, dict):
            flat |= {f"{section}.{name}": value for name, value in settings.items()}
        else:
            flat[section] = settings
    return flat


def _warnings(base: Run, run: Run) -> list[str]:
    texts = []
    ours, theirs = run.final_validation, base.final_validation
    if ours.consumed_tokens != theirs.consumed_tokens:
        texts.append(
            f"{run.name} was last validated after {ours.consumed_tokens:,} tokens, {base.name} after "
            f"{theirs.consumed_tokens:,}: the gap is not one of the recipe alone"
        )
    if ours.num_tokens != theirs.num_tokens:
        texts.append(
            f"{run.name} was validated on {ours.num_tokens:,} tokens, {base.name} on {theirs.num_tokens:,}: "
            "the losses are not of the same data"
        )
    return texts


def _align(row: list[str], widths: list[int]) -> str:
    cells = [
        cell.ljust(width) if column < 2 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _optional(value: Optional[float], pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_non_finite(item) for item in value]
    return value
