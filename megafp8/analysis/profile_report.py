"""The report of a profile: its parts beside their floors, idle time and exposed communication, as text and as data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from megafp8.analysis.profile import Profile, Trace, read_trace
from megafp8.analysis.profile_floors import step_floors
from megafp8.analysis.runs import LoadedRun, load_run
from megafp8.config import derived, iterations, model_shapes, topology
from megafp8.config.schema import ModelConfig, RunConfig
from megafp8.config.settings import convert_tree, with_values
from megafp8.device.gpus import find_gpu
from megafp8.errors import ConfigError, DataError
from megafp8.metrics.records import RECORDS_FILE
from megafp8.planning.planned_run import PlannedRun
from megafp8.planning.step_time import step_time_problem
from megafp8.utils.files import visible
from megafp8.utils.formatting import text_table

SHOWN_ROWS = 12
MAX_NAME, MAX_NAME_OF_TWO = 100, 50
TRACE_NAME = re.compile(r"rank(\d+)\.json(\.gz)?")


@dataclass(frozen=True)
class Floors:
    """Least seconds of a step by part; without them, why there are none."""

    seconds: Mapping[str, float]
    text: str


@dataclass(frozen=True)
class ProfileReport:
    """A trace and the floors of its parts."""

    path: Path
    trace: Trace
    floors: Floors

    def to_text(self) -> str:
        """Tables for a terminal."""
        trace = self.trace
        source = (
            "kernels of the GPU" if trace.has_kernels
            else "outermost operators of the CPU in place of kernels, of which the trace has none"
        )  # fmt: skip
        steps = (
            f"times per step of {trace.profile.steps}"
            if trace.has_steps
            else "times of the trace, which names no steps"
        )
        return "\n".join(
            [
                visible(f"{self.path}: {source}; {steps}"),
                visible(f"floors: {self.floors.text}"),
                "",
                profile_text(trace.profile, self.floors.seconds),
            ]
        )

    def to_data(self) -> dict[str, Any]:
        """All numbers, for JSON; times in milliseconds a step."""
        profile = self.trace.profile
        return {
            "trace": str(self.path),
            "source": "GPU kernels" if self.trace.has_kernels else "CPU operators",
            "steps": profile.steps if self.trace.has_steps else None,
            "span_ms": profile.span_ms(),
            "busy_ms": profile.busy_ms(),
            "idle_ms": profile.span_ms() - profile.busy_ms(),
            "exposed_communication_ms": profile.exposed_ms(),
            "floors": self.floors.text,
            "parts": [
                {"part": part, "ms": ms, "share_fraction": share, "kernels": kernels, "floor_ms": floor_ms}
                for part, ms, share, kernels, floor_ms in part_rows(profile, self.floors.seconds)
            ],
            "gemms": _as_data(("gemm", "ms", "kernels"), profile.gemm_rows()),
            "gaps": _as_data(("after", "until", "ms", "times"), profile.gaps()[:SHOWN_ROWS]),
            "kernels": _as_data(("part", "name", "ms", "kernels"), profile.longest()[:SHOWN_ROWS]),
        }


def report_profile(path: Path) -> ProfileReport:
    """Report on a trace, or on that of the lowest rank in a run's folder; `load_run` says what a folder has.

    Raises:
        DataError: there is no trace, or it or the run's records are damaged.
    """
    trace = find_trace(path)
    # Where a run writes it: RUN/profile/rank0.json. A trace alone has no configuration.
    folder = trace.absolute().parents[1]
    has_run = trace.parent.name == "profile" and (folder / RECORDS_FILE).is_file()
    read = read_trace(trace)
    floors = (
        floors_of(load_run(folder), trace) if has_run else Floors({}, "none, since the trace is in no run's folder")
    )
    return ProfileReport(trace, read, floors)


def find_trace(path: Path) -> Path:
    """The file itself, or the trace of the lowest rank of a run's folder.

    Raises:
        DataError: the folder has none.
    """
    if not path.is_dir():
        return path
    found = {}
    for each in (path / "profile").glob("rank*"):
        if name := TRACE_NAME.fullmatch(each.name):
            found[int(name[1])] = each
    if not found:
        raise DataError(f"{path / 'profile'}: no trace rank0.json; train with --profile, or give the file of a trace")
    return found[min(found)]


def floors_of(run: LoadedRun, trace: Path) -> Floors:
    """The floors of a run's profile on the rank that the trace's name has; none where the planner knows none."""
    info = run.info
    try:
        config = with_values(RunConfig(), convert_tree(info.config))
    except ConfigError as error:
        return Floors({}, f"none, since this version does not read the run's configuration: {error}")
    gpu = find_gpu(info.device_name)
    is_emulated = bool(derived.used_recipes(config.precision)) and info.mfu_dtype not in ("fp8", "fp4")
    problem = (
        f"the planner does not know {info.device_name}" if gpu is None
        else "FP8 and FP4 are emulated" if is_emulated
        else step_time_problem(config)
    )  # fmt: skip
    if gpu is None or problem is not None or info.num_parameters is None:
        return Floors({}, f"none, since {problem or 'the records have no number of parameters'}")
    planned = PlannedRun(
        config=config,
        gpu=gpu,
        world_size=info.world_size,
        padded_vocab=_padded_vocab(config.model, info.num_parameters),
        document_length=_document_length(run, iterations.tokens_per_step(config, info.world_size)),
    )
    name = TRACE_NAME.fullmatch(trace.name)
    rank = min(int(name[1]) if name else 0, info.world_size - 1)
    stage = topology.layout_of(config, info.world_size).coordinates(rank).pipeline
    return Floors(step_floors(planned, stage), f"FLOPs and bytes of the planner at the peak of {gpu.device_name}")


def _padded_vocab(model: ModelConfig, num_parameters: int) -> int:
    """Rows of the embedding, in which the number of parameters is linear. Records do not have the tokenizer's size."""
    without, one = (model_shapes.count_parameters(model, rows).total for rows in (0, 1))
    return (num_parameters - without) // (one - without)


def _document_length(run: LoadedRun, tokens: int) -> Optional[float]:
    """Mean length of a token's document in the last step; None if attention does not stop at the borders."""
    squares = run.steps[-1].document_squares if run.steps else None
    return None if squares is None else squares / tokens


def part_rows(profile: Profile, floors: Mapping[str, float]) -> list[tuple[str, float, float, float, Optional[float]]]:
    """(part, ms, share of the span, kernels, floor in ms) a step, longest first, then parts that have only a floor."""
    rows = profile.rows()
    rows += [(part, 0.0, 0.0) for part in floors if part not in {part for part, _, _ in rows}]
    span_ms = profile.span_ms()
    return [
        (part, ms, ms / span_ms if span_ms else 0.0, kernels, floors[part] * 1e3 if part in floors else None)
        for part, ms, kernels in rows
    ]


def profile_text(profile: Profile, floors: Mapping[str, float]) -> str:
    """Tables of parts, of idle time and of the longest kernels."""
    span, busy = profile.span_ms(), profile.busy_ms()
    parts = [
        (part, f"{ms:.3f}", f"{share:.1%}", f"{kernels:g}", "-" if floor is None else f"{floor:.3f}")
        for part, ms, share, kernels, floor in part_rows(profile, floors)
    ]
    gemms = [(gemm, f"{ms:.3f}", f"{number:g}") for gemm, ms, number in profile.gemm_rows()]
    waits = [
        (before[:MAX_NAME_OF_TWO], after[:MAX_NAME_OF_TWO], f"{ms:.3f}", f"{times:g}")
        for before, after, ms, times in profile.gaps()[:SHOWN_ROWS]
    ]
    kernels = [
        (part, name[:MAX_NAME], f"{ms:.3f}", f"{number:g}") for part, name, ms, number in profile.longest()[:SHOWN_ROWS]
    ]
    idle = f"idle {span - busy:.3f} ({1 - busy / span if span else 0:.1%})"
    tables = [
        text_table(("part", "ms", "share", "kernels", "floor ms"), parts),
        f"span {span:.3f} ms, busy {busy:.3f}, {idle}, only communication {profile.exposed_ms():.3f}",
        *([text_table(("GEMM of linears", "ms", "kernels"), gemms)] if gemms else []),
        *([text_table(("idle after", "until", "ms", "times"), waits, "ll")] if waits else []),
        text_table(("part", "longest kernels", "ms", "kernels"), kernels, "ll"),
    ]
    return "\n\n".join(tables)


def _as_data(names: tuple[str, ...], rows: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [dict(zip(names, row, strict=True)) for row in rows]
