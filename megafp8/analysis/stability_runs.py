"""The runs of a stability suite, read from its file and their records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.analysis.runs import LoadedRun, describe_unfinished, is_unfinished, load_run
from megafp8.errors import DataError
from megafp8.metrics.records import RECORDS_FILE
from megafp8.resilience.run_state import current_state
from megafp8.utils.files import UnreadableFile, read_text
from megafp8.utils.strict_json import parse_json

SUITE_FILE = "stability.json"  # of launch/stability.py
OUTPUT_FILE = "output.log"  # of launch/process_pool.py


@dataclass(frozen=True, kw_only=True)
class SuiteRun:
    """A run of a part.

    Attributes:
        choice: names of its options: recipe, seed, and others of the part.
        run: its records; None without any.
        problem: why it has no result; empty if it is done or diverged.
    """

    part: str
    choice: Mapping[str, str]
    run: Optional[LoadedRun]
    is_diverged: bool = False
    problem: str = ""

    @property
    def recipe(self) -> str:
        """Name of its recipe or control."""
        return self.choice["recipe"]

    @property
    def seed(self) -> str:
        """Its seed, as `seed3`."""
        return self.choice["seed"]

    @property
    def final_loss(self) -> Optional[float]:
        """Last validation loss; infinite after a divergence, None without a result."""
        if self.is_diverged:
            return math.inf
        last = self.run.last_validation if self.run else None
        if self.problem or last is None:
            return None
        return last.loss if math.isfinite(last.loss) else math.inf


def load_suite(folder: Path) -> tuple[dict[str, Any], list[SuiteRun]]:
    """Read the suite's file and the records of its runs.

    Raises:
        DataError: the folder has no suite, or its file is damaged.
    """
    path = folder / SUITE_FILE
    try:
        info = parse_json(read_text(path))
        entries = info.pop("runs")
        loaded: dict[str, SuiteRun] = {}
        runs = []
        for entry in entries:
            choice = {key: value for key, value in entry.items() if key not in ("part", "folder", "tokens")}
            name = entry["folder"]
            if name not in loaded:
                loaded[name] = load_suite_run(folder / name, entry["part"], choice)
            runs.append(dataclasses.replace(loaded[name], part=entry["part"], choice=choice))
    except (UnreadableFile, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is no file of a stability suite: {error}") from error
    return info, runs


def load_suite_run(folder: Path, part: str, choice: Mapping[str, str]) -> SuiteRun:
    """Read one run."""
    run = load_run(folder) if (folder / RECORDS_FILE).is_file() else None
    if run is None:
        return SuiteRun(part=part, choice=choice, run=None, problem=describe_unrecorded(folder))
    if not is_unfinished(folder):
        return SuiteRun(part=part, choice=choice, run=run)
    state = describe_unfinished(folder)
    problem = "" if state.is_diverged else state.reason
    return SuiteRun(part=part, choice=choice, run=run, is_diverged=state.is_diverged, problem=problem)


def describe_unrecorded(folder: Path) -> str:
    """Why a run has no records."""
    output = folder / OUTPUT_FILE
    if current_state(folder) is not None:
        return describe_unfinished(folder).reason
    return f"ended before it started, see {output}" if output.is_file() else "not started"


def names_of(runs: Sequence[SuiteRun]) -> list[str]:
    """The recipes of a part, in order."""
    return list(dict.fromkeys(run.recipe for run in runs))


def losses_by_seed(runs: Sequence[SuiteRun], name: str) -> dict[str, float]:
    """Final losses of a recipe by seed, of the runs that have a result."""
    return {run.seed: run.final_loss for run in runs if run.recipe == name and run.final_loss is not None}
