"""Loading of runs from their records, and descriptions of unfinished runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np

from megafp8.config.data_phases import EVENT
from megafp8.config.derived import split_shares
from megafp8.errors import DataError, NumericsError
from megafp8.metrics.records import (
    RECORDS_FILE,
    EvalRecord,
    EventRecord,
    ExpertRecord,
    QuantizationRecord,
    Record,
    RunRecord,
    StepRecord,
    from_json,
)
from megafp8.metrics.sinks.jsonl import current_records, lines_of, read_records
from megafp8.resilience.run_state import current_state
from megafp8.utils.files import visible

SEED_FOLDER = re.compile(r"seed-?\d+")


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """One run. Steps and evaluations that a resumption repeated are included once, with their last records."""

    name: str
    """The folder's name, made unique by `load_runs`."""
    folder: Path
    runs: tuple[RunRecord, ...]
    """The start and every resumption; at least one."""
    steps: tuple[StepRecord, ...]
    evals: tuple[EvalRecord, ...]
    stages: tuple[RunRecord, ...]
    """Those of `runs` with steps that are not superseded, in order; at least one."""
    events: tuple[EventRecord, ...]
    quantization_records: tuple[QuantizationRecord, ...] = ()
    expert_records: tuple[ExpertRecord, ...] = ()

    @property
    def info(self) -> RunRecord:
        """The newest of `stages`. Earlier stages may have had other settings."""
        return self.stages[-1]

    def series(self, field: str) -> np.ndarray:
        """One field of all step records, float64 [steps]; NaN for missing values."""
        values = [getattr(record, field) for record in self.steps]
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    def evals_of(self, split: str) -> tuple[EvalRecord, ...]:
        """Evaluations with this `EvalRecord.split`, in step order."""
        return tuple(record for record in self.evals if record.split == split)

    @property
    def last_validation(self) -> Optional[EvalRecord]:
        """None if the run was not validated yet."""
        return next(reversed(self.evals_of("valid")), None)

    @property
    def repetition(self) -> str:
        """Whether the run read text again, and from which step on; empty if its records do not say it."""
        fresh = self.info.fresh_tokens
        if fresh is None or not self.steps:
            return ""
        last = self.steps[-1]
        if last.consumed_tokens <= fresh:
            return "no text read twice"
        first = next(record.step for record in self.steps if record.consumed_tokens > fresh)
        earlier = " or earlier" if first == self.steps[0].step else ""  # a run that continues another one
        return f"text repeats from step {first:,}{earlier} on (read {last.consumed_tokens / fresh:.1f} times)"

    @property
    def data_phases(self) -> dict[str, int]:
        """Training tokens before the step in which each phase of data but the first began, by the phase's name."""
        tokens = {record.step + 1: record.consumed_tokens for record in self.steps}
        names = {event.detail.partition(",")[0]: event.step for event in self.events if event.name == EVENT}
        return {name: tokens[step] for name, step in list(names.items())[1:] if step in tokens}

    @property
    def memory_peak_bytes(self) -> Optional[int]:
        """Peak memory of all steps; None if it was not recorded."""
        return max((record.memory_peak_bytes for record in self.steps if record.memory_peak_bytes), default=None)

    @property
    def final_validation(self) -> EvalRecord:
        """The last validation.

        Raises:
            DataError: the run was never validated; the text says how to fix that.
        """
        if self.last_validation is None:
            raise DataError(
                f"run {self.name} ({self.folder}) has {len(self.steps)} step records and no validation; "
                f"{_fix_without_validation(self.info.config)}"
            )
        return self.last_validation


def folder_of(path: Union[str, Path]) -> Path:
    """The folder of a run, from the folder itself or its records file."""
    return Path(path).parent if Path(path).is_file() else Path(path)


def load_run(folder: Union[str, Path], *, name: Optional[str] = None) -> LoadedRun:
    """Read the records of one run.

    Args:
        folder: the run's --save folder, or its records file.

    Raises:
        DataError: there are no records, the file is damaged, or it has no run record.
    """
    path = Path(folder) if Path(folder).is_file() else Path(folder) / RECORDS_FILE
    if not path.is_file():
        raise DataError(f"no run in {folder}: there is no {RECORDS_FILE}; give the folder that the run had as --save")
    records = current_records(read_records(path))
    runs = _of_type(records, RunRecord)
    if not runs:
        unknown = f"{path} holds {len(records)} records and no run record, so it is not known what was run"
        raise DataError(unknown + _first_error(path))
    return LoadedRun(
        name=name or visible(path.resolve().parent.name),
        folder=path.parent,
        runs=runs,
        steps=tuple(sorted(_of_type(records, StepRecord), key=lambda record: record.step)),
        evals=tuple(sorted(_of_type(records, EvalRecord), key=lambda record: record.step)),
        stages=_stages(records),
        events=_of_type(records, EventRecord),
        quantization_records=tuple(sorted(_of_type(records, QuantizationRecord), key=lambda record: record.step)),
        expert_records=tuple(sorted(_of_type(records, ExpertRecord), key=lambda record: record.step)),
    )


def has_steps(folder: Union[str, Path]) -> bool:
    """Whether a run has a step record yet.

    Raises:
        DataError: the records file is damaged.
    """
    path = folder_of(folder) / RECORDS_FILE
    return path.is_file() and any(isinstance(record, StepRecord) for record in current_records(read_records(path)))


def run_names(folders: Sequence[Union[str, Path]]) -> list[str]:
    """Unique names of runs: the ends of their paths, as long as needed, and at least two parts if one is a seed folder.

    Raises:
        DataError: a folder is given twice.
    """
    parts = [tuple(map(visible, folder_of(folder).resolve().parts)) for folder in folders]
    for index, own in enumerate(parts):
        if own in parts[:index]:
            raise DataError(f"{folders[index]} is given twice; every run must be another one")
    num_parts = 2 if any(SEED_FOLDER.fullmatch(own[-1]) for own in parts) else 1
    while len({own[-num_parts:] for own in parts}) < len(parts):
        num_parts += 1
    return ["/".join(own[-num_parts:]) for own in parts]


def recipe_folder(folder: Path, name: str) -> Optional[str]:
    """Name of the folder of a recipe whose runs are in seed1, seed2 and so on; None if a run is not in such a folder.

    Args:
        name: of the run, from `run_names`.
    """
    folder = folder.resolve()
    if not SEED_FOLDER.fullmatch(folder.name):
        return None
    return name.rpartition("/")[0] or visible(folder.parent.name)


def load_runs(folders: Iterable[Union[str, Path]], *, left_out: Collection[Path] = ()) -> list[LoadedRun]:
    """Read several runs, with their names from `run_names`.

    Args:
        left_out: resolved folders of runs that take part in the naming but are not read.

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
    """The run records of `current_records` that are followed by step records; without any, the newest."""
    stages: list[RunRecord] = []
    newest: Optional[RunRecord] = None
    for record in records:
        if isinstance(record, RunRecord):
            newest = record
        elif isinstance(record, StepRecord) and newest is not None and newest not in stages[-1:]:
            stages.append(newest)
    return tuple(stages) if stages or newest is None else (newest,)


def _first_error(path: Path) -> str:
    """Description of the first invalid line, to be appended to an error; empty without one."""
    for number, line in enumerate(lines_of(path), start=1):
        try:
            if line.strip():
                from_json(line.decode("utf-8", errors="replace"))
        except DataError as error:
            return f"; line {number}: {error}"
    return ""


def _fix_without_validation(config: dict[str, Any]) -> str:
    """How to fix a finished run without a validation."""
    training, data = config.get("training", {}), config.get("data", {})
    if training.get("eval_iters") == 0:
        return "its --eval-iters 0 is no validation: train with --eval-iters above 0"
    for name, fix in (("train_data_path", "--valid-data-path"), ("data_phases", "--valid-data-path or --data-path")):
        if data.get(name) and not (data.get("valid_data_path") or data.get("data_path")):
            return f"it had --{name.replace('_', '-')} alone: train with {fix}, too"
    split = data.get("split")
    if split and not data.get("mock_data") and not any(split_shares(split)[1:2]):
        return f"its --split {split} holds nothing out: train with a second part above 0"
    return (
        "its settings ask for validations, so these records end before the first one: resume it with the command "
        "that started it, fetch the rest of its records, or leave it out"
    )


def _of_type(records: list[Record], cls: type) -> tuple:
    return tuple(record for record in records if isinstance(record, cls))


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """An unfinished run of a recipe.

    Attributes:
        recipe: name of the recipe; the parent folder for runs in seed folders.
        name: as in `load_runs`, such as `mxfp8/seed3`.
        is_diverged: whether it ended with non-finite numbers or a spike.
        has_figures: whether it is compared by its records so far.
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
    """Whether the run state says that a run is not done. A run without a state file counts as done."""
    state = current_state(folder)
    return state is not None and state.state != "done"


def describe_unfinished(folder: Path, *, name: Optional[str] = None, has_figures: bool = False) -> Unfinished:
    """Describe an unfinished run from its folder.

    Args:
        name: from `run_names`; default that of a single run.
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
