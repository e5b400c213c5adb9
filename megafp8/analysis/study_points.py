"""Finished runs of a scaling study as points, and their speed by size, recipe and number of devices.

Points are read from the study's folder, or from the `points.json` that a report wrote. From that file a report can be
made again without the runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np

from megafp8.analysis.compare import WARMUP_STEPS, median_after_warmup
from megafp8.analysis.pairing import recipe_of, seed_of, seedless, settings_key
from megafp8.analysis.runs import LoadedRun, load_run
from megafp8.config.settings import settings_by_name
from megafp8.errors import DataError
from megafp8.metrics.records import RECORDS_FILE, TaskScores
from megafp8.resilience.run_state import current_state
from megafp8.utils.files import UnreadableFile
from megafp8.utils.plain_data import from_plain
from megafp8.utils.strict_json import read_json

STUDY_FILE = "study.json"
POINTS_FILE = "points.json"
RECIPE_AXIS = "recipe"
OTHER_AXES = (RECIPE_AXIS, "seed", "tokens", "tokens_per_parameter", "gpus")
"""Axes that are no hyperparameters."""
LAST_FRACTION = 0.05
"""Of the steps, over whose losses a run without a validation is averaged."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One finished run.

    Attributes:
        choice: the option on each axis of the study's grid.
        recipe: the option on the axis `recipe` if there is one, else `arithmetic`.
        arithmetic: the recipe in words, from the run's records.
        device: its name.
        parameters: number of all parameters.
        tokens: training tokens before the last validation.
        flops: model FLOPs of these tokens, without recomputation.
        loss: of the last validation, in nats per token; of a sweep without validations the mean of the last steps.
        validation_tokens: number of tokens in that validation; 0: the loss is that of training.
        tokens_per_second: of the whole job, median over the steps after warm-up.
        settings: hash of the settings without the seed; equal for the runs of one configuration.
        tasks: scores of questions at the last validation.
    """

    label: str
    choice: Mapping[str, str]
    recipe: str
    arithmetic: str
    device: str
    layout: Mapping[str, int]
    world_size: int
    seed: int
    parameters: int
    tokens: int
    flops: float
    loss: float
    validation_tokens: int
    tokens_per_second: Optional[float]
    model_tflops_per_device: Optional[float]
    mfu_fraction: Optional[float]
    memory_peak_bytes: Optional[int]
    settings: str
    tasks: Mapping[str, TaskScores] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StudyPoints:
    """The finished runs of a study.

    Attributes:
        missing: labels of unfinished runs, with their state.
    """

    name: str
    points: tuple[Point, ...]
    missing: tuple[str, ...] = ()

    @property
    def is_validated(self) -> bool:
        """Whether losses are those of validations."""
        return all(point.validation_tokens for point in self.points)

    def to_json(self) -> str:
        """JSON for `read_points`."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def load_points(path: Path) -> StudyPoints:
    """Read a study's folder, or the points.json of a report.

    Raises:
        DataError: the path is neither, or has no finished run.
    """
    study = read_points(path) if path.is_file() else load_folder(path)
    if not study.points:
        raise DataError(f"{path}: none of the study's {len(study.missing)} runs is done, so there is nothing to report")
    return study


def load_folder(folder: Path) -> StudyPoints:
    """Read the finished runs of a study's folder, or of a folder with the folders of runs.

    Raises:
        DataError: there is neither, a run was never validated, or records are damaged.
    """
    if not (folder / STUDY_FILE).exists() and (folders := folders_of_runs(folder)):
        return load_runs_below(folder, folders)
    try:
        study = read_json(folder / STUDY_FILE)
    except UnreadableFile as error:
        if not error.is_missing:
            raise DataError(f"{error.path} cannot be read: {error.reason}") from error
        raise DataError(f"no study in {folder}: no {STUDY_FILE}, which megafp8 study writes") from None
    runs, missing = [], []
    for entry in study["runs"]:
        state = current_state(folder / entry["folder"])
        if state is not None and state.state == "done":
            runs.append((load_run(folder / entry["folder"], name=entry["label"]), entry["choice"]))
        else:
            missing.append(f"{entry['label']} ({'waiting' if state is None else state.state})")
    return StudyPoints(name=study["name"], points=points_of(runs), missing=tuple(missing))


def folders_of_runs(folder: Path) -> list[Path]:
    """The folders in a folder that is no run itself, which have records."""
    if not folder.is_dir() or (folder / RECORDS_FILE).exists():
        return []
    return sorted(path for path in folder.iterdir() if (path / RECORDS_FILE).is_file())


def load_runs_below(folder: Path, folders: Sequence[Path]) -> StudyPoints:
    """The finished ones of some runs. The settings in which they differ are the axes, by their flags."""
    states = {path: current_state(path) for path in folders}
    missing = [f"{path.name} ({state.state})" for path, state in states.items() if state and state.state != "done"]
    runs = [load_run(path) for path, state in states.items() if state is None or state.state == "done"]
    configs = [seedless(run.info) for run in runs]
    shared = [name for name in (configs[0] if configs else {}) if all(name in config for config in configs)]
    differing = [name for name in shared if any(config[name] != configs[0][name] for config in configs)]
    known = settings_by_name()
    labels = {name: (known[name].flags or known[name].off)[0] if name in known else name for name in differing}
    choices = [{labels[name]: text_of(config[name]) for name in differing} for config in configs]
    points = points_of(list(zip(runs, choices, strict=True)))
    return StudyPoints(name=folder.resolve().name, points=points, missing=tuple(missing))


def hyperparameters(choices: Iterable[Mapping[str, str]]) -> list[str]:
    """The axes, besides `OTHER_AXES`, on which some choices differ."""
    every = list(choices)
    names = dict.fromkeys(axis for choice in every for axis in choice if axis not in OTHER_AXES)
    return [axis for axis in names if len({choice.get(axis) for choice in every}) > 1]


def text_of(value: Any) -> str:
    """The value of a setting in a table."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def points_of(runs: Sequence[tuple[LoadedRun, Mapping[str, str]]]) -> tuple[Point, ...]:
    """The points of runs with their choices.

    A sweep can be ranked by the loss of training, where some run was never validated.

    Raises:
        DataError: a run lacks what a point needs.
    """
    has_one_size = len({run.info.num_parameters for run, _ in runs}) == 1
    is_sweep = has_one_size and bool(hyperparameters(choice for _, choice in runs))
    is_validated = not is_sweep or all(run.last_validation is not None for run, _ in runs)
    return tuple(point_of(run, choice, is_validated) for run, choice in runs)


def point_of(run: LoadedRun, choice: Mapping[str, str], is_validated: bool = True) -> Point:
    """The point of a run.

    Args:
        is_validated: False takes the loss of training.
    """
    info = run.info
    loss, tokens, validation_tokens = final_loss(run, is_validated)
    if info.num_parameters is None or info.flops_per_token is None:
        raise DataError(f"run {run.name} ({run.folder}) does not say how many parameters and FLOPs it has")
    return Point(
        label=run.name,
        choice=dict(choice),
        recipe=choice.get(RECIPE_AXIS, recipe_of(run)),
        arithmetic=recipe_of(run),
        device=info.device_name,
        layout=info.layout,
        world_size=info.world_size,
        seed=seed_of(run),
        parameters=info.num_parameters,
        tokens=tokens,
        flops=info.flops_per_token * tokens,
        loss=loss,
        validation_tokens=validation_tokens,
        tokens_per_second=median_after_warmup(run, "tokens_per_second", WARMUP_STEPS),
        model_tflops_per_device=median_after_warmup(run, "model_tflops_per_device", WARMUP_STEPS),
        mfu_fraction=median_after_warmup(run, "mfu_fraction", WARMUP_STEPS),
        memory_peak_bytes=run.memory_peak_bytes,
        settings=settings_of(run),
        tasks=(run.last_validation and run.last_validation.tasks) or {},
    )


def final_loss(run: LoadedRun, is_validated: bool) -> tuple[float, int, int]:
    """The loss, the training tokens before it, and the tokens of the validation.

    Raises:
        DataError: there is no validation, or no step.
    """
    if is_validated or not run.steps:
        final = run.final_validation
        return final.loss, final.consumed_tokens, final.num_tokens
    last = run.steps[-max(1, round(LAST_FRACTION * len(run.steps))) :]
    return float(np.mean([step.loss for step in last])), run.steps[-1].consumed_tokens, 0


def settings_of(run: LoadedRun) -> str:
    """Hash of the settings that affect a run, without the seed; of all stages if they changed."""
    stages = settings_key(run)
    settings = stages if len(stages) > 1 else seedless(run.info)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def read_points(path: Path) -> StudyPoints:
    """Read what `StudyPoints.to_json` wrote.

    Raises:
        DataError: the file is something else.
    """
    try:
        return from_plain(StudyPoints, read_json(path), ignores_unknown=True)
    except UnreadableFile as error:
        raise DataError(f"{path}: not the {POINTS_FILE} of a report: {error.reason}") from None


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """Speed of one size, recipe and number of devices, with the fastest layout.

    Attributes:
        efficiency: tokens/s per device over that with the smallest number of devices in the study.
        speedup: tokens/s over the baseline's on the same number of devices.
    """

    recipe: str
    parameters: int
    device: str
    world_size: int
    layout: str
    tokens_per_second: float
    efficiency: float
    speedup: Optional[float]
    model_tflops_per_device: Optional[float]
    mfu_fraction: Optional[float]
    memory_peak_bytes: Optional[int]


def speed_rows(points: Sequence[Point], baseline: str) -> list[SpeedRow]:
    """The fastest layout of each size, recipe and number of devices; medians over seeds."""
    groups: dict[tuple[Any, ...], dict[str, list[Point]]] = {}
    for point in points:
        if point.tokens_per_second is not None:
            key = (point.parameters, point.device, point.recipe, point.world_size)
            groups.setdefault(key, {}).setdefault(layout_text(point.layout), []).append(point)
    fastest: dict[tuple[Any, ...], tuple[float, str]] = {}
    for key, layouts in groups.items():
        speeds = [(median_of(members, "tokens_per_second") or 0.0, layout) for layout, members in layouts.items()]
        fastest[key] = max(speeds, key=lambda pair: pair[0])
    rows = []
    for key, (speed, layout) in fastest.items():
        parameters, device, recipe, world_size = key
        members = groups[key][layout]
        fewest = min(other[3] for other in fastest if other[:3] == key[:3])
        base = fastest.get((parameters, device, baseline, world_size))
        rows.append(
            SpeedRow(
                recipe=recipe,
                parameters=parameters,
                device=device,
                world_size=world_size,
                layout=layout,
                tokens_per_second=speed,
                efficiency=speed / world_size / (fastest[parameters, device, recipe, fewest][0] / fewest),
                speedup=speed / base[0] if base else None,
                model_tflops_per_device=median_of(members, "model_tflops_per_device"),
                mfu_fraction=median_of(members, "mfu_fraction"),
                memory_peak_bytes=max((m.memory_peak_bytes for m in members if m.memory_peak_bytes), default=None),
            )  # fmt: skip
        )
    return sorted(rows, key=lambda row: (row.parameters, row.device, row.world_size, row.recipe != baseline))


def median_of(points: Sequence[Point], field: str) -> Optional[float]:
    """Median of a field over the points that have it."""
    values: list[Any] = [getattr(point, field) for point in points if getattr(point, field) is not None]
    return float(np.median(values)) if values else None


def layout_text(layout: Mapping[str, int]) -> str:
    """The parallel layout as `tensor 2, data 4`, without axes of one rank."""
    return ", ".join(f"{axis} {ranks}" for axis, ranks in layout.items() if ranks > 1) or "one rank"
