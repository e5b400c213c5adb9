"""Verdicts of a stability suite, from the records of its runs.

Every verdict rests on paired seeds: two runs of a pair have the same initial weights and the same batches. A run that
ended with non-finite numbers or a spike has diverged; its loss counts as infinite. Runs without a result are named, and
the verdict of the part is without them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.analysis import stability_statistics
from megafp8.analysis.seed_statistics import BLIND, CONTROL, UNDECIDED
from megafp8.analysis.stability_gaps import (
    BETTER,
    INDISTINCT,
    SuiteGap,
    compare_losses,
    control_row,
    relative_gap,
    spread_row,
)
from megafp8.analysis.stability_runs import SuiteRun, load_suite, load_suite_run, losses_by_seed, names_of
from megafp8.analysis.stability_sweep import SweepRow, sweep_rows
from megafp8.config.variants import BASELINE, FORKS

NAMED_FORKS = 3
"""In the problem that some have no result."""


@dataclass(frozen=True, kw_only=True)
class SuiteReport:
    """All verdicts of a suite.

    Attributes:
        info: content of the suite's file, without its runs.
        spread_fraction: standard deviation of the baseline's final loss over its seeds; None without two, and where it
            diverged in one.
        problems: runs without a result.
    """

    info: Mapping[str, Any]
    runs: tuple[SuiteRun, ...]
    spread_fraction: Optional[float]
    pairs: tuple[SuiteGap, ...]
    sweep: tuple[SweepRow, ...]
    controls: tuple[SuiteGap, ...]
    continuation: tuple[SuiteGap, ...]
    problems: tuple[str, ...]

    @property
    def is_blind(self) -> bool:
        """Whether none of the known-bad controls was found, all of which have a result."""
        return bool(self.controls) and {row.verdict for row in self.controls} <= {INDISTINCT, BETTER}

    def of_part(self, part: str) -> list[SuiteRun]:
        """The runs of a part."""
        return [run for run in self.runs if run.part == part]

    def to_plain(self) -> dict[str, Any]:
        """Everything but the records, for JSON."""
        results = [
            {"part": run.part, **run.choice, "final_loss": run.final_loss, "is_diverged": run.is_diverged}
            for run in self.runs
        ]
        parts = ("pairs", "sweep", "controls", "continuation")
        return {
            "info": self.info, "spread_fraction": self.spread_fraction,
            **{part: [dataclasses.asdict(row) for row in getattr(self, part)] for part in parts},
            "problems": self.problems, "runs": results,
        }  # fmt: skip


def build_report(folder: Path) -> SuiteReport:
    """Judge the runs of a suite.

    Raises:
        DataError: as `load_suite`.
    """
    info, runs = load_suite(folder)
    of_part: dict[str, list[SuiteRun]] = {}
    for run in runs:
        of_part.setdefault(run.part, []).append(run)
    pairs, sweep = of_part.get("pairs", []), of_part.get("sweep", [])
    controls, continuation = of_part.get("controls", []), of_part.get("continuation", [])
    base_losses = list(losses_by_seed(pairs, BASELINE).values())
    has_spread = len(base_losses) > 1 and all(map(math.isfinite, base_losses))
    control_gaps, control_problems = read_controls(folder, info, controls)
    report = SuiteReport(
        info=info,
        runs=tuple(runs),
        spread_fraction=stability_statistics.relative_spread(base_losses) if has_spread else None,
        pairs=tuple(spread_row(pairs, name) for name in names_of(pairs) if name != BASELINE),
        sweep=tuple(sweep_rows(sweep)),
        controls=tuple(map(control_row, control_gaps)),
        continuation=tuple(spread_row(continuation, name) for name in names_of(continuation) if name != BASELINE),
        problems=(
            *(f"{run.part}: {' '.join(run.choice.values())}: {run.problem or 'no validation'}"
              for run in runs if run.final_loss is None),
            *control_problems,
        ),
    )  # fmt: skip
    if not report.is_blind:
        return report
    return dataclasses.replace(report, pairs=blinded(report.pairs), continuation=blinded(report.continuation))


def read_controls(folder: Path, info: Mapping[str, Any], whole: Sequence[SuiteRun]) -> tuple[list[SuiteGap], list[str]]:
    """Gaps of the known-bad controls, and forks without a result.

    A gap is that of a trunk: the mean over its forks, each at its last step.

    Args:
        whole: runs of a suite of an earlier version, which had no forks.
    """
    known_bad, planned = info.get("known_bad", {}), info.get("control_forks", ())
    if whole or not planned:
        return [compare_losses(whole, bad, good, UNDECIDED) for bad, good in known_bad.items() if whole], []
    forks = folder / "controls" / FORKS
    losses = {name: load_suite_run(forks / name, "controls", {}).final_loss for name in planned}
    rows = []
    for bad, good in known_bad.items():
        of_trunk: dict[str, list[float]] = {}
        for name in (name for name in planned if name.startswith(f"{bad}/")):
            point = name.partition("/")[2]
            loss, reference = losses[name], losses.get(f"{good}/{point}")
            if loss is not None and reference is not None:
                of_trunk.setdefault(point.partition("-")[0], []).append(relative_gap(loss, reference))
        gaps = tuple(sum(each) / len(each) for each in of_trunk.values())
        worse, better = (sum(gap == sign * math.inf for gap in gaps) for sign in (1, -1))
        rows.append(
            SuiteGap(
                name=bad, reference=good, verdict=UNDECIDED, gaps_fraction=gaps, num_diverged=worse,
                num_reference_diverged=better,
            )
        )  # fmt: skip
    missing = [name for name, loss in losses.items() if loss is None]
    names = ", ".join(missing[:NAMED_FORKS]) + (", ..." if len(missing) > NAMED_FORKS else "")
    return rows, [f"controls: {len(missing)} of {len(planned)} forks have no result: {names}"] if missing else []


def blinded(rows: Sequence[SuiteGap]) -> tuple[SuiteGap, ...]:
    """Rows without their verdicts on recipes."""
    return tuple(row if row.verdict == CONTROL else dataclasses.replace(row, verdict=BLIND) for row in rows)
