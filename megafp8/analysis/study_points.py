"""The finished runs of a study as points: what they cost, what they came to, how fast they were.

Points are read from the study's folder, or from the `points.json` that a report wrote: a report can be made again from
that small file, long after the runs are gone.

The speed of a scaling study's runs: of each size, recipe and number of devices, with the fastest layout.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

from megafp8.analysis.compare import WARMUP_STEPS, median_after_warmup
from megafp8.analysis.pairing import recipe_of, seed_of, seedless, settings_key
from megafp8.analysis.runs import LoadedRun, load_run
from megafp8.errors import DataError
from megafp8.resilience.run_state import current_state
from megafp8.utils.files import UnreadableFile
from megafp8.utils.strict_json import read_json

STUDY_FILE = "study.json"
POINTS_FILE = "points.json"
RECIPE_AXIS = "recipe"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One finished run.

    Attributes:
        choice: name of the option on each axis of the study's grid.
        recipe: option on the axis `recipe` where there is one, else the arithmetic.
        arithmetic: of the linears, as the run's records have it.
        device: its name.
        parameters: all of them.
        tokens: trained on before the last validation.
        flops: model FLOPs of those, recomputation not counted.
        loss: of the last validation, nats a token.
        validation_tokens: that it was taken on.
        tokens_per_second: median over steps after warm-up, all ranks together.
        settings: what the run computes, but for the seed; runs of one cell and configuration agree in it.
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


@dataclass(frozen=True, kw_only=True)
class StudyPoints:
    """A study as far as it is done.

    Attributes:
        missing: labels of runs that are not done, with their state.
    """

    name: str
    points: tuple[Point, ...]
    missing: tuple[str, ...] = ()

    def to_json(self) -> str:
        """What `read_points` reads back."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def load_points(path: Path) -> StudyPoints:
    """Read a study's folder, or the points of a report.

    Raises:
        DataError: it is neither, or has no finished run.
    """
    study = read_points(path) if path.is_file() else load_folder(path)
    if not study.points:
        raise DataError(f"{path}: none of the study's {len(study.missing)} runs is done, so there is nothing to report")
    return study


def load_folder(folder: Path) -> StudyPoints:
    """Read the finished runs of a study's folder.

    Raises:
        DataError: no study, a run that was never validated, or records that are damaged.
    """
    try:
        study = read_json(folder / STUDY_FILE)
    except UnreadableFile as error:
        if not error.is_missing:
            raise DataError(f"{error.path} cannot be read: {error.reason}") from error
        raise DataError(f"no study in {folder}: no {STUDY_FILE}, which launcher/scaling_study.py writes") from None
    points, missing = [], []
    for entry in study["runs"]:
        state = current_state(folder / entry["folder"])
        if state is not None and state.state == "done":
            points.append(point_of(load_run(folder / entry["folder"], name=entry["label"]), entry["choice"]))
        else:
            missing.append(f"{entry['label']} ({'waiting' if state is None else state.state})")
    return StudyPoints(name=study["name"], points=tuple(points), missing=tuple(missing))


def point_of(run: LoadedRun, choice: Mapping[str, str]) -> Point:
    """A run's records in one line."""
    info, final = run.info, run.final_validation
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
        tokens=final.consumed_tokens,
        flops=info.flops_per_token * final.consumed_tokens,
        loss=final.loss,
        validation_tokens=final.num_tokens,
        tokens_per_second=median_after_warmup(run, "tokens_per_second", WARMUP_STEPS),
        model_tflops_per_device=median_after_warmup(run, "model_tflops_per_device", WARMUP_STEPS),
        mfu_fraction=median_after_warmup(run, "mfu_fraction", WARMUP_STEPS),
        memory_peak_bytes=max((step.memory_peak_bytes for step in run.steps if step.memory_peak_bytes), default=None),
        settings=settings_of(run),
    )


def settings_of(run: LoadedRun) -> str:
    """A hash of what decides a run, but for its seed; of one that changed on the way, of all that it had."""
    stages = settings_key(run)
    settings = stages if len(stages) > 1 else seedless(run.info)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def read_points(path: Path) -> StudyPoints:
    """Read what `StudyPoints.to_json` wrote.

    Raises:
        DataError: it is something else.
    """
    try:
        plain = read_json(path)
        points = tuple(Point(**point) for point in plain["points"])
        return StudyPoints(name=plain["name"], points=points, missing=tuple(plain["missing"]))
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not the {POINTS_FILE} of a report: {error}") from None


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """Speed of one size under one recipe on so many devices, with its fastest layout.

    Attributes:
        efficiency: tokens/s of a device over that of the smallest number of devices in the study.
        speedup: tokens/s over the baseline's on as many devices.
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
    groups: dict[tuple, dict[str, list[Point]]] = {}
    for point in points:
        if point.tokens_per_second is not None:
            key = (point.parameters, point.device, point.recipe, point.world_size)
            groups.setdefault(key, {}).setdefault(layout_text(point.layout), []).append(point)
    fastest: dict[tuple, tuple[str, float, list[Point]]] = {}
    for key, layouts in groups.items():
        speeds = {name: float(np.median([one.tokens_per_second for one in some])) for name, some in layouts.items()}
        name = max(speeds, key=speeds.__getitem__)
        fastest[key] = name, speeds[name], layouts[name]
    rows = []
    for (parameters, device, recipe, world_size), (layout, speed, some) in fastest.items():
        fewest = min(key[3] for key in fastest if key[:3] == (parameters, device, recipe))
        base = fastest.get((parameters, device, baseline, world_size))
        rows.append(
            SpeedRow(
                recipe=recipe,
                parameters=parameters,
                device=device,
                world_size=world_size,
                layout=layout,
                tokens_per_second=speed,
                efficiency=speed / world_size / (fastest[parameters, device, recipe, fewest][1] / fewest),
                speedup=speed / base[1] if base else None,
                model_tflops_per_device=median_of(some, "model_tflops_per_device"),
                mfu_fraction=median_of(some, "mfu_fraction"),
                memory_peak_bytes=max((one.memory_peak_bytes for one in some if one.memory_peak_bytes), default=None),
            )  # fmt: skip
        )
    return sorted(rows, key=lambda row: (row.parameters, row.device, row.world_size, row.recipe != baseline))


def median_of(points: Sequence[Point], field: str) -> Optional[float]:
    """Median of a field over the points that have it."""
    values: list[Any] = [getattr(point, field) for point in points if getattr(point, field) is not None]
    return float(np.median(values)) if values else None


def layout_text(layout: Mapping[str, int]) -> str:
    """`tensor 2, data 4`; axes of one rank are left out."""
    return ", ".join(f"{axis} {ranks}" for axis, ranks in layout.items() if ranks > 1) or "one rank"
