"""A run as its records tell it.

Runs that are not done: what a comparison says of them beside the figures of the others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np

from megafp8.config.derived import split_shares
from megafp8.errors import DataError, NumericsError
from megafp8.metrics.records import (
    RECORDS_FILE,
    EvalRecord,
    EventRecord,
    QuantizationRecord,
    Record,
    RunRecord,
    StepRecord,
    from_json,
)
from megafp8.metrics.sinks.jsonl import current_records, lines_of, read_records
from megafp8.resilience.run_state import current_state

SEED_FOLDER = re.compile(r"seed-?\d+")


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """One run. Steps and evaluations that a resumption did again are in here once, as they were done last."""

    name: str
    """The folder's name; made unique by `load_runs`."""
    folder: Path
    runs: tuple[RunRecord, ...]
    """The start and every resumption; at least one."""
    steps: tuple[StepRecord, ...]
    evals: tuple[EvalRecord, ...]
    stages: tuple[RunRecord, ...]
    """Those of `runs` whose steps count, in order: without starts that made none and those that a later one went back
    behind. At least one."""
    events: tuple[EventRecord, ...]
    looks: tuple[QuantizationRecord, ...] = ()

    @property
    def info(self) -> RunRecord:
        """The newest run record that counts: what the run was in the end, not always all the way."""
        return self.stages[-1]

    def series(self, field: str) -> np.ndarray:
        """One field of all step records. Shape [steps], float64; NaN where a step did not measure it."""
        values = [getattr(record, field) for record in self.steps]
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    def evals_of(self, split: str) -> tuple[EvalRecord, ...]:
        """Evaluations on "valid" or "test", in order of steps."""
        return tuple(record for record in self.evals if record.split == split)

    @property
    def last_validation(self) -> Optional[EvalRecord]:
        """None of a run that was not validated yet."""
        return next(reversed(self.evals_of("valid")), None)

    @property
    def final_validation(self) -> EvalRecord:
        """The last validation of a run that must have one.

        Raises:
            DataError: the run was never validated, with the mend that its settings leave.
        """
        if self.last_validation is None:
            raise DataError(
                f"run {self.name} ({self.folder}) has {len(self.steps)} step records and no validation; "
                f"{_fix_without_validation(self.info.config)}"
            )
        return self.last_validation


def folder_of(path: Union[str, Path]) -> Path:
    """The folder of a run that is given by it, or by its records file."""
    return Path(path).parent if Path(path).is_file() else Path(path)


def load_run(folder: Union[str, Path], *, name: Optional[str] = None) -> LoadedRun:
    """Read the records of one run.

    Args:
        folder: the folder that was --save, or the records file itself.

    Raises:
        DataError: no records there, a damaged file, or a file without a run record.
    """
    path = Path(folder)
    path = path if path.is_file() else path / RECORDS_FILE
    if not path.is_file():
        raise DataError(f"no run in {folder}: there is no {RECORDS_FILE}; give the folder that the run had as --save")
    records = current_records(read_records(path))
    runs = _of_type(records, RunRecord)
    if not runs:
        raise DataError(
            f"{path} holds {len(records)} records and no run record, so it is not known what was run{_first_bad(path)}"
        )
    return LoadedRun(
        name=name or path.resolve().parent.name,
        folder=path.parent,
        runs=runs,
        steps=tuple(sorted(_of_type(records, StepRecord), key=lambda record: record.step)),
        evals=tuple(sorted(_of_type(records, EvalRecord), key=lambda record: record.step)),
        stages=_stages(records),
        events=_of_type(records, EventRecord),
        looks=tuple(sorted(_of_type(records, QuantizationRecord), key=lambda record: record.step)),
    )


def has_steps(folder: Union[str, Path]) -> bool:
    """Whether the records of a run have a step yet.

    Raises:
        DataError: a damaged file.
    """
    path = folder_of(folder) / RECORDS_FILE
    return path.is_file() and any(isinstance(record, StepRecord) for record in current_records(read_records(path)))


def run_names(folders: Sequence[Union[str, Path]]) -> list[str]:
    """What runs are called. Folders of the same name are told apart by as many of their parents as that takes, and
    those that are called after a seed have at least one.

    Raises:
        DataError: a folder is given twice.
    """
    parts = [folder_of(folder).resolve().parts for folder in folders]
    for index, own in enumerate(parts):
        if own in parts[:index]:
            raise DataError(f"{folders[index]} is given twice; every run must be another one")
    num_parts = 2 if any(SEED_FOLDER.fullmatch(own[-1]) for own in parts) else 1
    while len({own[-num_parts:] for own in parts}) < len(parts):
        num_parts += 1
    return ["/".join(own[-num_parts:]) for own in parts]


def recipe_folder(folder: Path, name: str) -> Optional[str]:
    """The folder whose runs are called seed1, seed2 and so on, where a run is one of them; None of others.

    Args:
        name: the run's, of `run_names`, which tells folders of the same name apart.
    """
    folder = folder.resolve()
    if not SEED_FOLDER.fullmatch(folder.name):
        return None
    return name.rpartition("/")[0] or folder.parent.name


def load_runs(folders: Iterable[Union[str, Path]], *, left_out: Collection[Path] = ()) -> list[LoadedRun]:
    """Read several runs, each with its name of `run_names`.

    Args:
        left_out: folders, resolved, of runs that are named with the others and not read.

    Raises:
        DataError: as `load_run` and `run_names`.
    """
    paths = [Path(folder) for folder in folders]
    return [
        load_run(path, name=name)
        for path, name in zip(paths, run_names(paths), strict=True)
        if folder_of(path).resolve() not in left_out
    ]


def _stages(records: Sequence[Record]) -> tuple[RunRecord, ...]:
    """The run records that are followed by what counts, of `current_records`; without any, the newest."""
    stages: list[RunRecord] = []
    newest: Optional[RunRecord] = None
    for record in records:
        if isinstance(record, RunRecord):
            newest = record
        elif isinstance(record, StepRecord) and newest is not None and newest not in stages[-1:]:
            stages.append(newest)
    return tuple(stages) if stages or newest is None else (newest,)


def _first_bad(path: Path) -> str:
    """The first line that is no record, in words to go on with; empty without one."""
    for number, line in enumerate(lines_of(path), start=1):
        try:
            if line.strip():
                from_json(line.decode("utf-8", errors="replace"))
        except DataError as error:
            return f"; line {number}: {error}"
    return ""


def _fix_without_validation(config: dict[str, Any]) -> str:
    """What to do about a run that is done and was never validated."""
    training, data = config.get("training", {}), config.get("data", {})
    if training.get("eval_iters") == 0:
        return "its --eval-iters 0 is no validation: train with --eval-iters above 0"
    if data.get("train_data_path") and not data.get("valid_data_path"):
        return "it had --train-data-path alone: train with --valid-data-path, too"
    split = data.get("split")
    if split and not data.get("mock_data") and not any(split_shares(split)[1:2]):
        return f"its --split {split} holds nothing out: train with a second part above 0"
    return (
        "its settings ask for validations, so these records end before the first one: let it go on by the command "
        "that started it, fetch the rest of its records, or leave it out"
    )


def _of_type(records: list[Record], cls: type) -> tuple:
    return tuple(record for record in records if isinstance(record, cls))


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """A run of a recipe that did not come to its end.

    Attributes:
        recipe: that it is of; the folder above for runs that are called after a seed.
        name: as `load_runs` has it: `mxfp8/seed3`.
        is_diverged: it ended with numbers that are not finite, or spiked.
        has_figures: it is compared all the same, by what it has so far.
    """

    recipe: str
    name: str
    reason: str
    is_diverged: bool = False
    has_figures: bool = False

    def __str__(self) -> str:
        where = "in the figures with what it has so far" if self.has_figures else "not in the figures"
        return f"{self.name} is not done and {where}: {self.reason}"


def is_unfinished(folder: Path) -> bool:
    """Whether a run says of itself that it is not done. One of which there are the records alone does not."""
    state = current_state(folder)
    return state is not None and state.state != "done"


def describe_unfinished(folder: Path, *, name: Optional[str] = None, has_figures: bool = False) -> Unfinished:
    """What is known of a run that is not done, from its folder.

    Args:
        name: of `run_names`; default that of a run alone.
    """
    state, name = current_state(folder), name or run_names([folder])[0]
    reason = "it never began" if state is None else state.reason or f"{state.state} at step {state.step}"
    return Unfinished(
        recipe=recipe_folder(folder, name) or name,
        name=name,
        reason=" ".join(reason.split()),
        is_diverged=state is not None and state.exit_status == NumericsError.exit_status,
        has_figures=has_figures,
    )
