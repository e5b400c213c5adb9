"""Modes and layouts of `gpu_layouts.py`, and what it measures, as rows and as a table."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import timing
from benchmarks.gpu_train import SHAPES
from benchmarks.planner_measurements import TP2, TP4
from megafp8.config import flags as config_flags
from megafp8.config.schema import RunConfig

W = "--fp8-param-gather"
OURS, PEER = "megafp8", "mcore"


@functools.cache
def config_of(flags: str) -> RunConfig:
    """Settings of a command line, unchecked."""
    return config_flags.parse(flags.split()).config


@dataclass(frozen=True)
class Layout:
    """Ranks and the flags that divide the work among them.

    Attributes:
        data_parallel: ranks that each train a batch of the shape.
        microbatches: of one sequence, in a pipeline, in place of the shape's batches.
    """

    num_gpus: int
    flags: str = ""
    data_parallel: int = 1
    microbatches: Optional[int] = None

    def global_batch(self, shape: str) -> int:
        """Sequences of a step, of all ranks."""
        if self.microbatches:
            return self.microbatches
        batch = config_of(SHAPES[shape]).training.global_batch_size
        assert batch is not None
        return self.data_parallel * batch

    def divides(self, shape: str) -> bool:
        """Whether the shape has layers for all stages, and experts for a layout of experts."""
        config = config_of(f"{SHAPES[shape]} {self.flags}")
        model, parallel = config.model, config.parallel
        has_experts = parallel.expert_model_parallel_size == 1 or bool(model.num_experts)
        return has_experts and model.num_layers % parallel.pipeline_model_parallel_size == 0


# Pipelines have four microbatches a stage. Ranks that share experts are data-parallel too.
LAYOUTS = {
    "1 GPU": Layout(1),
    "DP 2": Layout(2, data_parallel=2),
    "TP 2": Layout(2, TP2),
    "PP 2": Layout(2, "--pipeline-model-parallel-size 2 --micro-batch-size 1", microbatches=8),
    "CP 2": Layout(2, "--context-parallel-size 2"),
    "CP 2 a2a": Layout(2, "--context-parallel-size 2 --cp-comm-type a2a"),
    "CP 2 allgather": Layout(2, "--context-parallel-size 2 --cp-comm-type allgather"),
    "EP 2": Layout(2, "--expert-model-parallel-size 2", data_parallel=2),
    "DP 4": Layout(4, data_parallel=4),
    "TP 2, DP 2": Layout(4, TP2, data_parallel=2),
    "TP 4": Layout(4, TP4),
    "PP 4": Layout(4, "--pipeline-model-parallel-size 4 --micro-batch-size 1", microbatches=16),
    "EP 4": Layout(4, "--expert-model-parallel-size 4", data_parallel=4),
    "TP 2 overlapped": Layout(2, f"{TP2} --tp-comm-overlap"),
    "TP 4 overlapped": Layout(4, f"{TP4} --tp-comm-overlap"),
}


@dataclass(frozen=True)
class Task:
    """A mode under a layout: what one set of ranks does."""

    name: str
    mode: str

    @property
    def layout(self) -> Layout:
        """By its name."""
        return LAYOUTS[self.name]

    @property
    def environment(self) -> dict[str, str]:
        """NAME=VALUE words before the recipe."""
        words = itertools.takewhile(lambda word: "=" in word, self.mode.split())
        return dict(word.split("=", 1) for word in words)

    @property
    def software(self) -> str:
        """megafp8, or the peer where the recipe is behind an @."""
        return PEER if self._words[0].startswith("@") else OURS

    @property
    def recipe(self) -> str:
        """A key of `gpu_train.MODES`."""
        return self._words[0].removeprefix("@")

    @property
    def flags(self) -> str:
        """Those behind the recipe; of the peer the settings to turn off."""
        return " ".join(self._words[1:])

    @property
    def _words(self) -> list[str]:
        """Those behind the environment."""
        return list(itertools.dropwhile(lambda word: "=" in word, self.mode.split()))

    def __str__(self) -> str:
        return f"{self.name} {self.mode}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement; the names are those of `planner_measurements.py`.

    Attributes:
        extra: all flags beyond the shape's and the recipe's.
        gathered_mb: what a rank gets of updated weights in a step, 1e6 bytes; None where nothing is gathered.
        step_ms: median of the steps.
        mean_ms: of the same steps.
        times_ms: of each of them, rounded.
        cuda_versions: of cuBLASLt, cuDNN, NCCL, NVSHMEM and the driver, empty in older rows.
        megatron: version of megatron-core, empty in older rows.
        num_repeated: steps that were computed twice for want of rows of experts or documents; None of the peer.
        attended: mean part of a sequence that is the document of a token; None without borders.
        losses: of all its steps.
        layout: its name; whatever follows from that is in LAYOUTS.
        flags: the mode's, without its recipe; of the peer the settings that are turned off.
        environment: the mode's, as it was given.
        software: as `planner_measurements.py` names it: megafp8, or mcore for the peer.
    """

    shape: str
    recipe: str
    extra: str
    label: str
    num_gpus: int
    step_ms: float
    peak_gib: float
    gathered_mb: Optional[float]
    losses: list[float]
    device: str
    layout: str
    flags: str
    environment: str = ""
    software: str = OURS
    mean_ms: Optional[float] = None
    times_ms: Sequence[float] = ()
    attended: Optional[float] = None
    num_repeated: Optional[int] = None
    megatron: str = ""
    cuda_versions: Mapping[str, Optional[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.label} {self.mode}"

    @property
    def mode(self) -> str:
        """The recipe, the peer's behind an @."""
        return f"@{self.recipe}" if self.software == PEER else self.recipe

    @property
    def same_ranks(self) -> tuple[str, str]:
        """What rows have in common that are compared: layout and environment."""
        return self.layout, self.environment


def mode_text(task: Task, shape: str) -> str:
    """RECIPE FLAGS, with the batch, unless the flags have another, and those of the layout. Of the peer: what megafp8
    does in its place."""
    flags = task.flags if task.software == OURS else ""
    return f"{task.recipe} --global-batch-size {task.layout.global_batch(shape)} {flags} {task.layout.flags}"


def table(rows: Sequence[Row]) -> str:
    """All of it for people."""
    medians = list(median_rows(rows))
    bf16 = {(row.software, *row.same_ranks): row.step_ms for row in medians if row.recipe == "bf16"}
    alone = {(row.environment, row.mode, row.flags): sequences_a_gpu(row) for row in medians if row.num_gpus == 1}
    cells = []
    for row in medians:
        base = bf16.get((row.software, *row.same_ranks))
        peer = fastest_peer(medians, row) if row.software == OURS else None
        one = alone.get((row.environment, row.mode, row.flags)) or alone.get(("", row.mode, row.flags))
        cells.append((
            row.label, row.mode, row.step_ms, base and base / row.step_ms, one and sequences_a_gpu(row) / one,
            row.peak_gib, row.gathered_mb, peer and peer / row.step_ms,
        ))  # fmt: skip
    header = ("layout", "recipe", "step ms", "speed to BF16", "scaling", "peak GiB", "gathered MB", "speed to peer")
    return timing.format_table(header, cells)


def fastest_peer(rows: Sequence[Row], ours: Row) -> Optional[float]:
    """Step of the peer with the same recipe on the same ranks, with the best of its settings; None without one."""
    peers = [row for row in rows if row.software == PEER and row.recipe == ours.recipe]
    return min((row.step_ms for row in peers if row.same_ranks == ours.same_ranks), default=None)


def median_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """One row a task, with the median of its times and its highest peak, in the order of the first round."""
    by_task: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        by_task.setdefault((row.shape, *row.same_ranks, row.mode, row.flags), []).append(row)
    for same in by_task.values():
        step_ms, peak_gib = statistics.median(row.step_ms for row in same), max(row.peak_gib for row in same)
        yield dataclasses.replace(same[0], step_ms=step_ms, peak_gib=peak_gib)


def sequences_a_gpu(row: Row) -> float:
    """Sequences that a GPU trains in a millisecond."""
    batch = f"--global-batch-size {LAYOUTS[row.layout].global_batch(row.shape)}"
    config = config_of(f"{SHAPES[row.shape]} {batch} {row.flags if row.software == OURS else ''}")
    assert config.training.global_batch_size is not None
    return config.training.global_batch_size / row.num_gpus / row.step_ms


def fitting(num_gpus: int, shape: str) -> list[str]:
    """The layouts that so many GPUs hold; those with overlapped communication are for who asks for them."""
    return [
        name for name, layout in LAYOUTS.items()
        if layout.num_gpus <= num_gpus and "overlapped" not in name and layout.divides(shape)
    ]  # fmt: skip
