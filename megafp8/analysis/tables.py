"""Comparison as text: for a terminal, as Markdown, JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

from megafp8.analysis.compare import Comparison, ComparisonRow, RecipeRow
from megafp8.analysis.findings import headline
from megafp8.analysis.percent import (
    MAX_INTERVAL_RATIO,
    NOT_DETERMINED,
    count_text,
    is_wide,
    percent,
    signed,
    signed_interval,
)
from megafp8.analysis.runs import LoadedRun
from megafp8.analysis.seed_statistics import CONTROL, Interval
from megafp8.utils.files import visible
from megafp8.utils.formatting import escape_markdown, escaped_markdown_table, text_table
from megafp8.utils.strict_json import to_strict_json

MIB = 2**20
WORD_COLUMNS = ("run", "recipe", "verdict", "tokens at equal loss", "time at equal loss")
DETAIL_COLUMNS = ("TFLOP/s per device", "steps", "tokens")
"""Not in a terminal, where tables are narrow; the files have them."""
MAX_COLUMNS = 100
"""Characters of a line in a terminal."""
Row = Union[RecipeRow, ComparisonRow]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with its title and a note. `sides` has one letter per column: `l` for left, `r` for right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    sides: str = "l"

    @classmethod
    def of_columns(cls, title: str, columns: Mapping[str, Sequence[str]]) -> Table:
        """The columns that have a value, by their headers."""
        sides = "".join("l" if name in WORD_COLUMNS else "r" for name in columns)
        table = cls(title=title, header=tuple(columns), rows=tuple(zip(*columns.values(), strict=True)), sides=sides)
        return table.without_empty_columns()

    def without_empty_columns(self) -> Table:
        """The table without the columns that have no value."""
        columns = zip(self.header, zip(*self.rows, strict=True), strict=True)
        return self.without_columns([name for name, cells in columns if set(cells) <= {"", "-"}])

    def without_columns(self, names: Collection[str]) -> Table:
        """The table without the columns of these headers."""
        shown = [index for index, name in enumerate(self.header) if name not in names]
        sides = self.sides.ljust(len(self.header), "r")
        return dataclasses.replace(
            self, header=tuple(self.header[index] for index in shown), sides="".join(sides[index] for index in shown),
            rows=tuple(tuple(row[index] for index in shown) for row in self.rows),
        )  # fmt: skip

    def to_text(self, max_columns: int = MAX_COLUMNS) -> str:
        """For a terminal, without title and note: one table, or several with the same first column if it is too wide.

        Args:
            max_columns: characters of a line, unless two columns already have more.
        """
        columns = list(zip(self.header, *self.rows, strict=True))
        widths = [max(map(len, map(visible, column))) for column in columns]
        blocks: list[list[int]] = [[0]]
        for index in range(1, len(columns)):
            width = sum(widths[each] + 2 for each in blocks[-1]) + widths[index]
            if width > max_columns and len(blocks[-1]) > 1:
                blocks.append([0])
            blocks[-1].append(index)
        sides = self.sides.ljust(len(columns), "r")
        shown = []
        for block in blocks:
            header, *rows = zip(*(columns[index] for index in block), strict=True)
            shown.append(text_table(header, rows, "".join(sides[index] for index in block)))
        return "\n\n".join(shown)

    def to_markdown(self) -> str:
        """As Markdown, without title and note."""
        return escaped_markdown_table(self.header, self.rows, self.sides)


def to_text(comparison: Comparison) -> str:
    """For a terminal: the headline, aligned tables, then notes, differences and warnings."""
    shown = [table.without_columns(DETAIL_COLUMNS) for table in _tables(comparison)]
    parts = [visible(headline(comparison)), *(table.to_text() for table in shown)]
    texts = map(visible, (*notes(comparison), *comparison.differences, *_warnings(comparison)))
    return "\n\n".join([*parts, "\n".join(texts)]).rstrip()


def to_markdown(comparison: Comparison) -> str:
    """As Markdown: the headline, tables, notes, and a list of differences and warnings."""
    parts = [escape_markdown(headline(comparison))]
    parts += [table.to_markdown() for table in _tables(comparison)]
    parts += map(escape_markdown, notes(comparison))
    texts = [f"- {escape_markdown(text)}" for text in (*comparison.differences, *_warnings(comparison))]
    return "\n\n".join([*parts, "\n".join(texts)]).rstrip() + "\n"


def to_json(comparison: Comparison) -> str:
    """The headline and all fields as JSON; non-finite numbers are null."""
    return to_strict_json({"headline": headline(comparison)} | dataclasses.asdict(comparison))


STEP_FIELDS = (
    "step", "consumed_tokens", "loss", "learning_rate", "grad_norm", "step_ms", "tokens_per_second",
    "memory_peak_bytes",
)  # fmt: skip


def runs_csv(comparison: Comparison) -> str:
    """The runs as CSV: a line for each, with all fields of `ComparisonRow`."""
    return to_csv([dataclasses.asdict(row) for row in comparison.rows])


def steps_csv(runs: Sequence[LoadedRun]) -> str:
    """The steps of all runs as CSV, with the loss of the validation after a step where there was one."""
    rows = []
    for run in runs:
        validated = {record.step: record.loss for record in run.evals_of("valid")}
        for record in run.steps:
            values = {name: getattr(record, name) for name in STEP_FIELDS}
            rows.append({"run": run.name} | values | {"validation_loss": validated.get(record.step)})
    return to_csv(rows)


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as CSV; None is an empty cell."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _tables(comparison: Comparison) -> list[Table]:
    """The table of recipes, and the table of runs if a recipe has more than one."""
    has_more_runs = len(comparison.rows) > len(comparison.drawn)
    found = [
        recipe_table(comparison), task_table(comparison), equal_loss_table(comparison),
        run_table(comparison) if has_more_runs else None,
    ]  # fmt: skip
    return [table for table in found if table is not None]


def recipe_table(comparison: Comparison) -> Table:
    """The table of recipes."""
    columns = recipe_columns(comparison)
    if all(len(row.seeds) < 2 and not row.num_missing for row in comparison.recipes):
        del columns["seeds"]
    return Table.of_columns("Table of recipes", columns)


def recipe_columns(comparison: Comparison) -> dict[str, list[str]]:
    """All columns of the table of recipes, by their headers."""
    rows, baseline = comparison.recipes, comparison.baseline
    intervals = [None if row.name == baseline else row.gap for row in rows]
    return {
        "run": [row.name for row in rows],
        "seeds": [shown_seeds(row) for row in rows],
        "validation loss": [optional(row.validation_loss, "{:.4f}") for row in rows],
        "gap": ["baseline" if row.name == baseline else shown_gap(row.gap) for row in rows],
        f"{comparison.confidence:.0%} interval": [signed_interval(interval) for interval in intervals],
        f"bound {percent(comparison.bound_fraction)}": [row.verdict or "-" for row in rows],
        "training gap": [shown_training_gap(row, baseline) for row in rows],
        "recipe": [row.recipe for row in rows],
        **_common_columns(rows),
    }


def task_table(comparison: Comparison) -> Optional[Table]:
    """Scores of questions, a row for each task and recipe; None without tasks."""
    names = dict.fromkeys(name for row in comparison.recipes for name in row.tasks)
    found = [(name, row, row.tasks[name]) for name in names for row in comparison.recipes if name in row.tasks]
    if not found:
        return None
    gaps = [None if row.name == comparison.baseline else task.gap for _, row, task in found]
    columns = {
        "task": [name for name, _, _ in found],
        "run": [row.name for _, row, _ in found],
        "bits/byte": [f"{task.bits_per_byte:.4f}" for _, _, task in found],
        "gap": ["baseline" if gap is None else shown_gap(gap) for gap in gaps],
        f"{comparison.confidence:.0%} interval": [signed_interval(gap) for gap in gaps],
        "accuracy": [optional(task.accuracy, "{:.2%}") for _, _, task in found],
        "per byte": [optional(task.normalized_accuracy, "{:.2%}") for _, _, task in found],
    }
    return Table.of_columns("Scores of questions", columns)


def equal_loss_table(comparison: Comparison) -> Optional[Table]:
    """Tokens and time to the same loss, of the recipes that have them; None if none has."""
    rows = [row for row in comparison.recipes if row.equal_loss_tokens is not None]
    columns = {
        "run": [row.name for row in rows],
        "tokens at equal loss": [shown_ratio(row.equal_loss_tokens) for row in rows],
        "time at equal loss": [shown_ratio(row.equal_loss_time) for row in rows],
    }
    if not rows:
        return None
    return Table.of_columns("Tokens and time at equal loss", columns)


def run_table(comparison: Comparison) -> Table:
    """The table of runs."""
    rows = comparison.rows
    columns = {
        "run": [row.name for row in rows],
        "seed": [f"{row.seed}" for row in rows],
        "validation loss": [optional(row.validation_loss, "{:.4f}") for row in rows],
        "gap": ["-" if row.relative_gap_fraction is None else finite(row.relative_gap_fraction) for row in rows],
        **_common_columns(rows),
    }
    return Table.of_columns("Table of runs", columns)


def notes(comparison: Comparison) -> list[str]:
    """Notes on verdicts and noise."""
    return [text for text in (verdict_note(comparison), equal_loss_note(comparison), control_note(comparison)) if text]


def verdict_note(comparison: Comparison) -> str:
    """What the verdicts mean; empty for a single recipe."""
    if len(comparison.recipes) < 2:
        return ""
    bound, confidence = percent(comparison.bound_fraction), f"{comparison.confidence:.0%}"
    if all(len(row.seeds) < 2 for row in comparison.recipes if row.verdict):
        return (
            f"One seed gives no interval, so there is no verdict on the bound of {bound}: train more seeds "
            "(megafp8 run-comparison --seeds 3)."
        )
    missing = ", or runs are missing" if any(row.num_missing for row in comparison.recipes) else ""
    return (
        f"within: the complete {confidence} interval of the gap lies below {bound}; beyond: above it; not decided: the "
        f"interval contains the bound{missing}. Gaps are taken between runs of one seed."
    )


def equal_loss_note(comparison: Comparison) -> str:
    """What the ratios at equal loss mean; empty without one."""
    if all(row.equal_loss_tokens is None for row in comparison.recipes):
        return ""
    return (
        f"Tokens and time at equal loss: those of a recipe over those of {comparison.baseline}, to the same validation "
        "loss, which is the larger of a pair's last losses. Below 1x is better. Time is the sum of step times. Not "
        f"determined: the interval spans more than a factor of {MAX_INTERVAL_RATIO:g}."
    )


def control_note(comparison: Comparison) -> str:
    """The size of noise, from the control; empty without a validated control on the baseline's data."""
    controls = (row for row in comparison.drawn if row.verdict == CONTROL and not row.other_data)
    row = next((row for row in controls if row.gaps_fraction), None)
    if row is None:
        return ""
    reach = max(map(abs, row.gaps_fraction))
    return (
        f"{row.name} is a control: {comparison.baseline} with its gradients summed in another order. In one seed they "
        f"differ by up to {reach:.2%}; any change of rounding causes gaps of this size."
    )


def shown_seeds(row: RecipeRow) -> str:
    """3, or 2/3 if one is missing."""
    found = len(row.seeds)
    return f"{found}/{found + row.num_missing}" if row.num_missing else f"{found}"


def shown_gap(gap: Optional[Interval]) -> str:
    """+0.50%; "not finite" after a divergence; - without a gap."""
    return "-" if gap is None else finite(gap.mean)


def shown_training_gap(row: RecipeRow, baseline: str) -> str:
    """+0.50%; - for the baseline and without a gap."""
    return "-" if row.name == baseline else shown_gap(row.training_gap)


def shown_ratio(ratio: Optional[Interval]) -> str:
    """1.05x (0.98x to 1.12x); - without a ratio, and "not determined" for a wide interval."""
    if ratio is None:
        return "-"
    if is_wide(ratio.low, ratio.high):
        return NOT_DETERMINED
    band = "" if ratio.low is None or ratio.high is None else f" ({ratio.low:.2f}x to {ratio.high:.2f}x)"
    return f"{ratio.mean:.2f}x{band}"


def finite(gap: float) -> str:
    """+0.50%; "not finite" for NaN and infinity."""
    return signed(gap) if math.isfinite(gap) else "not finite"


def _common_columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    # Training losses are shown only if a row has no validation loss.
    is_needed = any(row.steps is not None and row.validation_loss is None for row in rows)
    return {
        "training loss": [optional(row.training_loss if is_needed else None, "{:.4f}") for row in rows],
        "perplexity": [optional(row.perplexity, "{:.2f}") for row in rows],
        "tokens/s": [optional(row.tokens_per_second, "{:,.0f}") for row in rows],
        "speed": [optional(row.speed_ratio, "{:.2f}x") for row in rows],
        "TFLOP/s per device": [optional(row.model_tflops_per_device, "{:.3g}") for row in rows],
        "peak MiB": [optional(row.memory_peak_bytes and row.memory_peak_bytes / MIB, "{:,.0f}") for row in rows],
        "steps": [optional(row.steps, "{}") for row in rows],
        "tokens": ["-" if row.consumed_tokens is None else count_text(row.consumed_tokens) for row in rows],
    }


def optional(value: Optional[float], pattern: str) -> str:
    """A formatted number; - for None."""
    return "-" if value is None else pattern.format(value)


def _warnings(comparison: Comparison) -> list[str]:
    return [f"Warning: {text}" for text in comparison.warnings]
