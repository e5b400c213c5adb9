"""What `gpu_matrix.py` measures, as rows of a file and as a table."""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import matrix, timing
from benchmarks.gpu_matrix_blocks import FP8, Block
from benchmarks.matrix import BASE

EMULATED = "all layers are emulated"
"""Of a warning, whose reason may have the words of a map instead of its flag."""
NOT_OF_SPEED = (" stands for ", " is read as ", " no effect")
"""Of warnings about what flags mean."""
short = functools.partial(textwrap.shorten, width=100, placeholder="...")
"""Of a text, whose whole is in the file."""
HEADER = (
    "model", "block", "side", "step ms", "to the peer", "to BF16", "to the default", "graph", "idle", "peak GiB",
    "finite", "",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measurement, or why there is none.

    Attributes:
        step_ms: median of the steps.
        tokens_per_second: of a GPU.
        has_graph: whether steps were a CUDA graph; None of the peer.
        idle: part of two profiled steps in which no kernel ran; None where they were not profiled.
        said: warnings before step 1, and why there is no CUDA graph.
        own_flags: flags that the default does not have.
        cuda_versions: of cuBLASLt, cuDNN, NCCL, NVSHMEM and the driver, empty in older rows.
        error: the last lines of a failure.
    """

    shape: str
    block: str
    side: str
    own_flags: Sequence[str] = ()
    step_ms: Optional[float] = None
    times_ms: Sequence[float] = ()
    tokens_per_second: Optional[float] = None
    peak_gib: Optional[float] = None
    losses: Sequence[float] = ()
    has_graph: Optional[bool] = None
    idle: Optional[float] = None
    said: Sequence[str] = ()
    device: str = ""
    cuda_versions: Mapping[str, Optional[str]] = field(default_factory=dict)
    error: str = ""

    @property
    def is_named(self) -> bool:
        """Whether a warning of speed names a flag that the default does not have, or the run was to emulate."""
        warnings = [text for text in self.said if not any(word in text for word in NOT_OF_SPEED)]
        has_warning = any(word in text for text in warnings for word in (*self.own_flags, EMULATED))
        return has_warning or "--transformer-impl" in self.own_flags

    @property
    def is_finite(self) -> bool:
        """Whether all losses are."""
        return all(map(math.isfinite, self.losses))


class Table:
    """What a file has of some blocks."""

    def __init__(self, blocks: Sequence[Block], path: Path):
        self.blocks = blocks
        self.found: dict[tuple[str, str], dict[str, list[Row]]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            row = Row(**json.loads(line))
            self.found.setdefault((row.shape, row.block), {}).setdefault(row.side, []).append(row)

    def rows(self, block: Block) -> dict[str, list[Row]]:
        """Of a block, by side."""
        return self.found.get((block.shape, block.name), {})

    def steps(self, block: Block) -> matrix.Steps:
        """Times of the sides that trained."""
        times = {side: [row.step_ms for row in rows if row.step_ms] for side, rows in self.rows(block).items()}
        return {side: each for side, each in times.items() if each}

    def missing(self, block: Block) -> list[str]:
        """Sides to measure."""
        failed = [side for side, rows in self.rows(block).items() if any(row.error for row in rows)]
        return matrix.missing(list(block.sides), self.steps(block), failed)

    def to_default(self, row: Row) -> Optional[float]:
        """Its tokens/s to those of the default model, in BF16 or FP8."""
        defaults = self.found.get((row.shape, "default"), {}).get(BASE if row.side == BASE else FP8, [])
        default = next((each.tokens_per_second for each in defaults), None)
        return default and row.tokens_per_second and row.tokens_per_second / default

    def lines(self) -> Iterator[tuple[Any, ...]]:
        """A line for each side of megafp8, and for each failure of the peer."""
        for block in self.blocks:
            steps = self.steps(block)
            for side, (row, *_) in self.rows(block).items():
                place = (block.shape, block.name, side)
                if row.error:
                    yield (*place, *([None] * 8), f"failed: {short(last_line(row.error))}")
                elif not side.startswith("@"):
                    speeds = matrix.speeds(steps, side)
                    to_peer = next((speed for name, speed in speeds.items() if name.startswith("@")), None)
                    slow = matrix.slower_than(steps, side)
                    words = [f"slower than {' and '.join(slow)}", "named" if row.is_named else "NOT NAMED"]
                    yield (
                        *place, statistics.median(steps[side]), to_peer, speeds.get(BASE), self.to_default(row),
                        "yes" if row.has_graph else "no", None if row.idle is None else f"{row.idle:.0%}",
                        row.peak_gib, "yes" if row.is_finite else "NO",
                        "; ".join([*(words if slow else ()), *map(short, row.said)]),
                    )  # fmt: skip

    def unnamed(self) -> Iterator[str]:
        """Slow sides of which no warning tells."""
        for block in self.blocks:
            steps = self.steps(block)
            for side in (side for side in steps if not side.startswith("@")):
                slow = matrix.slower_than(steps, side)
                if slow and not self.rows(block)[side][0].is_named:
                    speeds = matrix.speeds(steps, side)
                    text = ", ".join(f"{speeds[name]:.2f} of {name}" for name in slow)
                    yield f"{block.shape}, {block.name}, {side}: {text}"

    def failed(self) -> Iterator[str]:
        """Sides without a time, and the last line of each."""
        for block in self.blocks:
            for side, rows in self.rows(block).items():
                if error := next((row.error for row in rows if row.error), ""):
                    yield f"{block.shape}, {block.name}, {side}: {last_line(error)}"

    def summary(self) -> str:
        """What to look at."""
        slow, failed = list(self.unnamed()), list(self.failed())
        lacking = [count for block in self.blocks if (count := len(self.missing(block)))]
        return "\n".join([
            f"slow and not named: {len(slow)}", *(f"- {line}" for line in slow),
            f"failed: {len(failed)}", *(f"- {line}" for line in failed),
            f"to measure: {sum(lacking)} sides of {len(lacking)} blocks",
        ])  # fmt: skip

    def text(self) -> str:
        """All of it for people."""
        return f"{timing.format_table(HEADER, list(self.lines()))}\n\n{self.summary()}"


def last_line(error: str) -> str:
    """The message of a traceback."""
    return error.splitlines()[-1].strip()
