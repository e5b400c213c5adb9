"""The speed of a scaling study's runs: of each size, recipe and number of devices, with the fastest layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from megafp8.reports.study_points import Point


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
                recipe=recipe, parameters=parameters, device=device, world_size=world_size, layout=layout,
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
