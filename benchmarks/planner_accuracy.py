"""Accuracy of the planner: every measured and published step time and memory size, compared with its prediction.

    python benchmarks/planner_accuracy.py [--write] [--fit] [--rows FILE]

Prints a summary and every row; `--write` puts the summary into benchmarks/results/planner.md and the rows into the
CSV files beside it, `--fit` fits the constants of `megafp8/planning/planned_run.py` again. `--rows` prints instead the
errors for the rows of `gpu_layouts.py --json FILE`, each on the GPU that it names. Bars, for rows held out of the fit:
memory 10%, step time 15%.
"""

from __future__ import annotations

import argparse
import csv
import io
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.planner_fit import fit
from benchmarks.planner_measurements import FIT, HELD_OUT, MEASUREMENTS, Measurement
from benchmarks.planner_published import LEFT_OUT, PUBLISHED, Published
from megafp8.planning.layouts import LayoutSearch
from megafp8.planning.step_time import step_time
from megafp8.resources.memory import estimate_stages
from megafp8.utils.formatting import markdown_table, text_table

RESULTS = ROOT / "benchmarks/results/planner.md"
ROWS = ROOT / "benchmarks/results/planner"
BEGIN, END = "<!-- planner accuracy: begin -->\n", "<!-- planner accuracy: end -->\n"
TIME_BAR, MEMORY_BAR = 0.15, 0.10
GIB = 2**30


@dataclass(frozen=True)
class Compared:
    """A measured row and its prediction. Errors are (predicted - measured) / measured."""

    row: Measurement
    step_ms: Optional[float]
    peak_gib: Optional[float]

    @property
    def time_error(self) -> Optional[float]:
        """Of the step."""
        return None if self.row.step_ms is None or self.step_ms is None else self.step_ms / self.row.step_ms - 1

    @property
    def memory_error(self) -> Optional[float]:
        """Of what torch allocates."""
        return None if self.row.peak_gib is None or self.peak_gib is None else self.peak_gib / self.row.peak_gib - 1

    @property
    def memory_role(self) -> str:
        """Whether the peak was held out."""
        return self.row.memory_role or self.row.role


def compare(row: Measurement) -> Compared:
    """Predict what was measured."""
    run = row.run()
    step_ms = step_time(run).seconds * 1e3 if row.step_ms is not None else None
    estimates = estimate_stages(run.sizes, implementation=row.implementation)
    return Compared(row, step_ms, max(estimate.total_bytes for estimate in estimates) / GIB)


def measured_rows(compared: Sequence[Compared]) -> list[tuple[str, ...]]:
    """A header and every measured row."""
    header = ("measured on H200", "GPUs", "time", "step ms", "predicted ms", "time error", "memory", "peak GiB",
              "predicted GiB", "memory error")  # fmt: skip
    rows: list[tuple[str, ...]] = [header]
    for entry in compared:
        row = entry.row
        name = f"{row.name} ({row.note})" if row.note else row.name
        of_time = (
            (row.role, f"{row.step_ms:.1f}", f"{entry.step_ms:.1f}", f"{entry.time_error:+.1%}")
            if row.step_ms is not None
            else ("",) * 4
        )
        of_memory = (
            (entry.memory_role, f"{row.peak_gib:.1f}", f"{entry.peak_gib:.1f}", f"{entry.memory_error:+.1%}")
            if row.peak_gib is not None
            else ("",) * 4
        )
        rows.append((name, str(row.num_gpus), *of_time, *of_memory))
    return rows


def summary_table(compared: Sequence[Compared]) -> str:
    """What the table comes to."""
    held_out = [entry for entry in compared if entry.row.role == HELD_OUT and entry.row.step_ms]
    of_memory = [entry for entry in compared if entry.memory_role == HELD_OUT and entry.row.peak_gib]
    rows = []
    for name, bar, errors in (
        ("step time, 1 GPU", TIME_BAR, [entry.time_error for entry in held_out if entry.row.num_gpus == 1]),
        ("step time, 2 and 4 GPUs", TIME_BAR, [entry.time_error for entry in held_out if entry.row.num_gpus > 1]),
        ("peak memory, 1 GPU", MEMORY_BAR, [entry.memory_error for entry in of_memory if entry.row.num_gpus == 1]),
        ("peak memory, 2 and 4 GPUs", MEMORY_BAR, [e.memory_error for e in of_memory if e.row.num_gpus > 1]),
    ):
        sizes = [abs(error) for error in errors if error is not None]
        cells = (str(len(sizes)), f"{statistics.median(sizes):.1%}", f"{max(sizes):.1%}", f"{bar:.0%}")
        rows.append((name, *cells, str(sum(size > bar for size in sizes))))
    return markdown_table(("held out", "rows", "median error", "largest", "bar", "outside"), rows)


def published_rows(searches: Mapping[Published, LayoutSearch]) -> list[tuple[str, ...]]:
    """A header and every published row."""
    lines: list[tuple[str, ...]] = [
        ("published", "GPUs", "model", "recipe", "tokens/s/GPU", "predicted", "error", "layout taken")
    ]
    for row, found in searches.items():
        source = f"{row.source} ({row.role})" if row.role == FIT else row.source
        cells = [source, f"{row.num_gpus} x {row.gpu}", row.model, row.recipe, f"{row.tokens_per_s:.0f}"]
        if found.layouts:
            best = found.layouts[0]
            speed = best.step.tokens_per_s_per_gpu
            cells += [f"{speed:.0f}", f"{speed / row.tokens_per_s - 1:+.0%}", best.name]
        else:
            cells += ["nothing fits", "", ""]
        lines.append(tuple(cells))
    return lines


def search_published() -> dict[Published, LayoutSearch]:
    """Layouts of every published row."""
    return {row: row.search() for row in PUBLISHED}


def csv_text(rows: Sequence[Sequence[str]]) -> str:
    """Rows as CSV."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def row_files(searches: Mapping[Published, LayoutSearch]) -> dict[str, str]:
    """The CSV files in ROWS, by name."""
    compared = [compare(row) for row in MEASUREMENTS]
    return {
        "measured.csv": csv_text(measured_rows(compared)),
        "published.csv": csv_text(published_rows(searches)),
    }


def summary() -> str:
    """The summary table of the held-out rows."""
    return summary_table([compare(row) for row in MEASUREMENTS])


def committed() -> str:
    """The summary that planner.md has."""
    return RESULTS.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="update benchmarks/results/planner.md and its CSV files")
    parser.add_argument("--fit", action="store_true", help="print the constants that the rows marked fit give")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="print the errors for what gpu_layouts.py measured")
    options = parser.parse_args(argv)
    if options.fit:
        print(fit())
        return 0
    if options.rows:
        from benchmarks import planner_rows  # here, as it imports torch

        text, problems = planner_rows.report(options.rows)
        print("\n".join([text, *problems]))
        return 1 if problems else 0
    files = row_files(search_published())
    for text in files.values():
        header, *rows = csv.reader(text.splitlines())
        print(text_table(header, rows), end="\n\n")
    print(LEFT_OUT, summary(), sep="\n\n")
    if options.write:
        before, rest = RESULTS.read_text(encoding="utf-8").split(BEGIN)
        RESULTS.write_text(before + BEGIN + summary() + "\n" + END + rest.split(END)[1], encoding="utf-8")
        for name, text in files.items():
            (ROWS / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
