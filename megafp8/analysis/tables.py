"""A comparison as text: for a terminal, as Markdown, as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Optional, Union

from megafp8.analysis.compare import Comparison, ComparisonRow, RecipeRow
from megafp8.analysis.seed_statistics import CONTROL, UNDECIDED
from megafp8.utils.formatting import aligned, escaped, markdown_of_texts
from megafp8.utils.strict_json import to_strict_json

MIB = 2**20
WORDS = "ll"  # the first two columns of both tables

Row = Union[RecipeRow, ComparisonRow]


def to_text(comparison: Comparison) -> str:
    """For a terminal: columns in line, then what the verdict means, differences and warnings."""
    parts = [aligned(*recipe_cells(comparison), WORDS)]
    if len(comparison.rows) > len(comparison.drawn):
        parts.append(aligned(*run_cells(comparison), WORDS))
    remarks = [*notes(comparison), *comparison.differences, *_warnings(comparison)]
    return "\n\n".join([*parts, "\n".join(remarks)]).rstrip()


def to_markdown(comparison: Comparison) -> str:
    """The same as Markdown tables and a list."""
    parts = [markdown_of_texts(*recipe_cells(comparison), WORDS)]
    if len(comparison.rows) > len(comparison.drawn):
        parts.append(markdown_of_texts(*run_cells(comparison), WORDS))
    parts += map(escaped, notes(comparison))
    remarks = [f"- {escaped(text)}" for text in (*comparison.differences, *_warnings(comparison))]
    return "\n\n".join([*parts, "\n".join(remarks)]).rstrip() + "\n"


def to_json(comparison: Comparison) -> str:
    """All fields; numbers that are not finite become null."""
    return to_strict_json(dataclasses.asdict(comparison))


def recipe_cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of recipes; columns that no recipe has are left out."""
    rows = comparison.recipes
    several = any(len(row.seeds) > 1 or row.num_missing for row in rows)
    columns = {
        "run": [row.name for row in rows],
        "recipe": [row.recipe for row in rows],
        "seeds": [shown_seeds(row) if several else "-" for row in rows],
        "validation loss": [optional(row.validation_loss, "{:.4f}") for row in rows],
        "gap": [shown_gap(row, comparison.baseline) for row in rows],
        f"{comparison.confidence:.0%} interval": [shown_interval(row, comparison.baseline) for row in rows],
        f"bound {percent(comparison.bound_fraction)}": [row.verdict or "-" for row in rows],
        "training gap": [shown_training_gap(row, comparison.baseline) for row in rows],
    }
    return _shown(columns | _common_columns(rows))


def run_cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of single runs."""
    rows = comparison.rows
    columns = {
        "run": [row.name for row in rows],
        "recipe": [row.recipe for row in rows],
        "seed": [f"{row.seed}" for row in rows],
        "validation loss": [optional(row.validation_loss, "{:.4f}") for row in rows],
        "gap": ["-" if row.relative_gap_fraction is None else signed(row.relative_gap_fraction) for row in rows],
    }
    return _shown(columns | _common_columns(rows))


def notes(comparison: Comparison) -> list[str]:
    """What the verdicts mean, and how large noise is."""
    return [text for text in (verdict_note(comparison), *data_notes(comparison), control_note(comparison)) if text]


def verdict_note(comparison: Comparison) -> str:
    """What the verdicts mean; empty where nothing is compared."""
    if len(comparison.recipes) < 2:
        return ""
    bound, confidence = percent(comparison.bound_fraction), f"{comparison.confidence:.0%}"
    if all(len(row.seeds) < 2 for row in comparison.recipes if row.verdict):
        return (
            f"One seed has no spread, so whether a gap stays within {bound} is not decided: train more seeds "
            "(tools/run_comparison.py --seeds 3)"
        )
    missing = ", or runs are missing" if any(row.num_missing for row in comparison.recipes) else ""
    return (
        f"within: the whole {confidence} interval of the gap lies below {bound}; beyond: above it; not decided: the "
        f"seeds scatter too widely for either{missing}. Gaps are taken between runs of one seed."
    )


def data_notes(comparison: Comparison) -> list[str]:
    """Of which recipes nothing is decided because they had other data than the baseline."""
    return [
        f"{row.name} is not decided, whatever its gap: it has another {' and another '.join(row.other_data)} than "
        f"{comparison.baseline}"
        for row in comparison.recipes
        if row.other_data and row.verdict == UNDECIDED
    ]


def control_note(comparison: Comparison) -> str:
    """What the control says about noise; empty without one of the baseline's data that was validated."""
    controls = (row for row in comparison.drawn if row.verdict == CONTROL and not row.other_data)
    row = next((row for row in controls if row.gaps_fraction), None)
    if row is None:
        return ""
    reach = max(map(abs, row.gaps_fraction))
    return (
        f"{row.name} is {comparison.baseline} with its gradients summed in another order: up to {reach:.2%} lies "
        "between the two in a seed. A gap of that size is what any change of rounding does to a run, and no finding."
    )


def percent(fraction: float) -> str:
    """0.005 -> 0.5%."""
    return f"{100 * fraction:g}%"


def signed(fraction: float) -> str:
    """0.00512 -> +0.51%; what rounds to zero has no minus."""
    return f"{round(fraction, 4) + 0.0:+.2%}"


def shown_seeds(row: RecipeRow) -> str:
    """3, or 2/3 where one is missing."""
    there = len(row.seeds)
    return f"{there}/{there + row.num_missing}" if row.num_missing else f"{there}"


def shown_gap(row: RecipeRow, baseline: str) -> str:
    """+0.50%; the baseline says that it is one; - where there is none."""
    if row.name == baseline:
        return "baseline"
    return "-" if row.gap is None else signed(row.gap.mean)


def shown_training_gap(row: RecipeRow, baseline: str) -> str:
    """+0.50%; - for the baseline, and where there is none."""
    return "-" if row.name == baseline or row.training_gap is None else signed(row.training_gap.mean)


def shown_interval(row: RecipeRow, baseline: str) -> str:
    """-0.10% to +0.30%; - where there is none."""
    if row.name == baseline or row.gap is None or row.gap.low is None or row.gap.high is None:
        return "-"
    return f"{signed(row.gap.low)} to {signed(row.gap.high)}"


def _common_columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    # Beside validation losses it would be one more number for the same; a run without any has nothing else.
    is_needed = any(row.steps is not None and row.validation_loss is None for row in rows)
    return {
        "training loss": [optional(row.training_loss if is_needed else None, "{:.4f}") for row in rows],
        "perplexity": [optional(row.perplexity, "{:.2f}") for row in rows],
        "tokens/s": [optional(row.tokens_per_second, "{:,.0f}") for row in rows],
        "speed": [optional(row.speed_ratio, "{:.2f}x") for row in rows],
        "TFLOP/s per device": [optional(row.model_tflops_per_device, "{:.3g}") for row in rows],
        "peak MiB": [optional(row.memory_peak_bytes and row.memory_peak_bytes / MIB, "{:,.0f}") for row in rows],
        "steps": [optional(row.steps, "{}") for row in rows],
        "tokens": [optional(row.consumed_tokens, "{:,}") for row in rows],
    }


def optional(value: Optional[float], pattern: str) -> str:
    """A number in its pattern; - for None."""
    return "-" if value is None else pattern.format(value)


def _warnings(comparison: Comparison) -> list[str]:
    return [f"Warning: {text}" for text in comparison.warnings]


def _shown(columns: dict[str, list[str]]) -> tuple[list[str], list[list[str]]]:
    shown = {name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)}
    return list(shown), [list(row) for row in zip(*shown.values(), strict=True)]
