"""Shared by the benchmarks: alternating measurements, medians and ratios with their uncertainty, tables, JSON.

Sides that are compared run alternately, in rounds, with every second round in reverse order, so that changes of the
machine's speed affect all of them equally. A ratio is computed for each round, and the median of these is reported.

CPU time does not count other processes, so it varies less than wall time if the process computes on one thread. It
excludes waiting for files. The part of the wall time without computation is reported; on an idle machine it is close
to zero.
"""

from __future__ import annotations

import cProfile
import dataclasses
import json
import math
import pstats
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megafp8.device.cuda_libraries import cuda_library_versions
from megafp8.utils.formatting import markdown_table

QUIET_FRACTION = 0.05


@dataclass
class Times:
    """What one side took, round by round."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    @property
    def median_wall_ms(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.wall_ms)

    @property
    def median_cpu_ms(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.cpu_ms)

    def extend(self, more: Times) -> None:
        """Add the rounds of a repetition."""
        self.wall_ms += more.wall_ms
        self.cpu_ms += more.cpu_ms


@dataclass(frozen=True)
class Ratio:
    """A median of ratios, and the interval that holds the true median in 95 of 100 cases."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def own_times_ms(run: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU time of this process in one call."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    run()
    return (time.perf_counter() - wall_s) * 1e3, (time.process_time() - cpu_s) * 1e3


def take_turns(
    runs: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 2,
    times_ms: Callable[[Callable[[], Any]], tuple[float, float]] = own_times_ms,
) -> dict[str, Times]:
    """Call every function once a round.

    Args:
        rounds: rounds that count.
        warmup: rounds before them that do not.
        times_ms: calls a function; its wall and CPU time.
    """
    for _ in range(warmup):
        for run in runs.values():
            run()
    times = {name: Times() for name in runs}
    for number in range(rounds):
        for name in runs if number % 2 == 0 else reversed(runs):
            wall_ms, cpu_ms = times_ms(runs[name])
            times[name].wall_ms.append(wall_ms)
            times[name].cpu_ms.append(cpu_ms)
    return times


def ratio_of(times: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Median of the ratios of what belongs to one round, with its interval from order statistics (binomial, normal
    approximation; below six rounds it is their whole range)."""
    ratios = sorted(mine / other for mine, other in zip(times, reference, strict=True))
    count, half_width = len(ratios), 0.98 * math.sqrt(len(ratios))  # 1.96 sqrt(n) / 2 ranks
    low = max(0, math.floor((count - 1) / 2 - half_width))
    high = min(count - 1, math.ceil((count - 1) / 2 + half_width))
    return Ratio(statistics.median(ratios), ratios[low], ratios[high])


def ratios_to(reference: str, times: Mapping[str, Times]) -> dict[str, dict[str, Ratio]]:
    """For each side the ratio of its wall and of its CPU times to the reference's."""
    wall_ms, cpu_ms = times[reference].wall_ms, times[reference].cpu_ms
    return {
        name: {"wall": ratio_of(side.wall_ms, wall_ms), "cpu": ratio_of(side.cpu_ms, cpu_ms)}
        for name, side in times.items()
    }


def lost_fraction(times: Mapping[str, Times]) -> float:
    """Share of the wall time in which this process did not compute. Meant for one thread."""
    wall, cpu = (sum(sum(getattr(side, name)) for side in times.values()) for name in ("wall_ms", "cpu_ms"))
    return max(0.0, 1 - cpu / wall)


def clock_to_trust(times: Mapping[str, Times]) -> str:
    """`wall` on a quiet machine, else `cpu`."""
    return "wall" if lost_fraction(times) <= QUIET_FRACTION else "cpu"


def describe_quiet(times: Mapping[str, Times]) -> str:
    """A line on how far the wall times can be trusted."""
    verdict = "quiet" if clock_to_trust(times) == "wall" else "NOT QUIET: rather trust the CPU times"
    return f"{lost_fraction(times):.1%} of the wall time was not computing ({verdict})"


def format_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, aligned: first column to the left, the others to the right. Floats get three digits."""
    return markdown_table(header, [[format_cell(cell) for cell in row] for row in rows])


def format_cell(cell: Any) -> str:
    """1234.5 -> 1,234; 12.34 -> 12.3; None -> empty."""
    if cell is None:
        return ""
    if not isinstance(cell, float):
        return str(cell)
    if not math.isfinite(cell) or abs(cell) >= 100:
        return f"{cell:,.0f}"
    return f"{cell:.2f}" if abs(cell) < 10 else f"{cell:.1f}"


def profile_calls(run: Callable[[], Any], repeats: int, within: str) -> list[tuple[str, float, float]]:
    """Where one call of `run` spends its time: (function, calls, milliseconds with all that it calls), longest first.

    Args:
        repeats: calls to average over.
        within: only functions whose file's path has this folder in it. The profiler slows down Python, not kernels.
    """
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(repeats):
        run()
    profile.disable()
    found = []
    for (file, _, name), (_, calls, _, cumulative_s, _) in pstats.Stats(profile).stats.items():
        parts = Path(file).parts
        if within in parts:
            path = "/".join(parts[len(parts) - parts[::-1].index(within) :])
            found.append((f"{path} {name}", calls / repeats, cumulative_s * 1e3 / repeats))
    return sorted(found, key=lambda entry: -entry[2])


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a benchmark's result for machines to read, with the versions of the CUDA libraries unless it has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if "cuda_versions" not in result:
        result = {"cuda_versions": cuda_library_versions(), **result}
    path.write_text(json.dumps(result, indent=2, default=plain) + "\n", encoding="utf-8")


def plain(value: Any) -> Any:
    """Dataclasses as objects, everything else that JSON does not know as text."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)
