"""Whole steps of mixtures: recipe x format x dispatcher x expert-parallel ranks, beside megatron-core's loop.

    python benchmarks/expert_matrix.py --shard 1/7 --json FILE [--minutes 9]
    PYTHONPATH=FOLDER_WITH_ANOTHER_MEGATRON_CORE:$PYTHONPATH python benchmarks/expert_matrix.py ... --only peer
    python benchmarks/expert_matrix.py --json FILE                (the table of what is measured)

A block is a shape, a layout and a dispatcher, with BF16, recipes and the peer one after the other (`gpu_layouts.py`,
which writes the rows). A shard takes every Nth block, measures what the file lacks, and starts no block after
`--minutes`: run the shards one after the other, and again until nothing is missing. Ten steps are not timed: in the
first ones routing changes most, and a graph that has too few rows is captured again.

The peer has the dispatcher `alltoall`, and is in one block of a layout; its steps take up to five times as long, and
half as many are timed. Where Transformer Engine has one launch per GEMM (`megatron_loop.py`), the peer uses it. In FP8
it has no fused router, whose gradient fails with FP8's padding (megatron-core 0.16.1 and 0.19.2).

`matrix.py` says which cells count as slower, and which are measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import matrix, timing
from benchmarks.gpu_layout_rows import LAYOUTS, config_of
from benchmarks.gpu_train import SHAPES
from benchmarks.matrix import BASE, Steps

ONE, TWO = "1 GPU", "EP 2"
HYBRID = ("tensorwise", "delayed", "blockwise")
OURS = (BASE, *HYBRID, "tensorwise-e4m3", "delayed-e4m3")
PEERS = tuple(f"@{recipe}" for recipe in (BASE, *HYBRID))
DISPATCHER = "--moe-token-dispatcher-type"
ONE_LAUNCH = "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM=1"
MOST_EXPERTS = 64  # of Transformer Engine's launch
WITHOUT_ONE_LAUNCH = ("@delayed", "@blockwise")
"""It does not know delayed scaling; its cast to blocks fails with an assertion on the device (2.20.2)."""


class Block(NamedTuple):
    """What is measured together."""

    shape: str
    layout: str
    dispatcher: str

    @property
    def has_peer(self) -> bool:
        """One dispatcher of each layout has it, and the formats that others repeat."""
        return self.dispatcher in ("auto", "peer")

    @property
    def has_one_launch(self) -> bool:
        """Whether Transformer Engine multiplies the experts of a rank in one launch."""
        num_experts = config_of(SHAPES[self.shape]).model.num_experts
        assert num_experts is not None
        return num_experts // LAYOUTS[self.layout].num_gpus <= MOST_EXPERTS

    @property
    def recipes(self) -> tuple[str, ...]:
        """What it compares."""
        return (*OURS, *PEERS) if self.has_peer else (BASE, *HYBRID)

    def mode(self, recipe: str) -> str:
        """As `gpu_layouts.py` takes it."""
        if recipe.startswith("@"):
            settings = [recipe] if recipe == f"@{BASE}" else [recipe, "moe_router_fusion"]
            is_launched = self.has_one_launch and recipe not in WITHOUT_ONE_LAUNCH
            return " ".join([ONE_LAUNCH, *settings] if is_launched else settings)
        return f"{recipe} {DISPATCHER} {self.dispatcher}"


def blocks(shapes: Sequence[str]) -> list[Block]:
    """All of them, those that users meet first at the front."""
    places = [(ONE, "auto"), *((TWO, dispatcher) for dispatcher in ("peer", "alltoall", "allgather"))]
    return [Block(shape, *place) for place in places for shape in shapes]


def read(path: Path) -> dict[Block, Steps]:
    """The measurements of each block."""
    found: dict[Block, Steps] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        is_peer, layout = row["software"] == "mcore", row["layout"]
        block = Block(row["shape"], layout, dispatcher_of(row, is_peer))
        recipe = f"@{row['recipe']}" if is_peer else row["recipe"]
        found.setdefault(block, {}).setdefault(recipe, []).append(row["step_ms"])
    return found


def dispatcher_of(row: dict[str, Any], is_peer: bool) -> str:
    """The dispatcher of the block of a row."""
    if is_peer:
        return "auto" if row["layout"] == ONE else "peer"
    return row["flags"].removeprefix(f"{DISPATCHER} ")


def measure(block: Block, recipes: Sequence[str], options: argparse.Namespace) -> None:
    """Measure some recipes of a block, whose rows are appended to the file one by one."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_layouts.py"), "--shape", block.shape, "--append"]
    command += ["--layouts", block.layout, "--json", str(options.json.resolve())]
    for is_peer in (False, True):
        modes = [block.mode(recipe) for recipe in recipes if recipe.startswith("@") is is_peer]
        counts = (max(2, count // (2 if is_peer else 1)) for count in (options.warm_up, options.steps))
        flags = itertools.chain(*zip(("--warm-up", "--steps"), map(str, counts), strict=True))
        if modes:
            subprocess.run([*command, *flags, "--modes", *modes], cwd=ROOT)


def cells(found: dict[Block, Steps]) -> list[tuple[Any, ...]]:
    """The table: a line for each recipe of each block, with a word where it is slower."""
    lines = []
    for block, steps in found.items():
        for recipe in (recipe for recipe in OURS if recipe in steps):
            speeds = matrix.speeds(steps, recipe)
            slow = matrix.slower_than(steps, recipe)
            to_peer = next((speed for name, speed in speeds.items() if name.startswith("@")), None)
            words = f"slower than {' and '.join(slow)}" if slow else ""
            lines.append((*block, recipe, statistics.median(steps[recipe]), speeds.get(BASE), to_peer, words))
    return lines


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["M1", "M2", "M3"])
    matrix.add_options(parser)
    parser.add_argument("--json", type=Path, required=True, help="file with the rows of all shards")
    parser.add_argument("--only", choices=("megafp8", "peer"), help="measure one of both")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--steps", type=int, default=8)
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit status 1 while something is missing."""
    options = parse(argv)
    began, all_blocks = time.monotonic(), blocks(options.shapes)
    found = read(options.json)
    complete = [block for block, steps in found.items() if set(block.recipes) <= set(steps)]
    for block in matrix.blocks_of(options.shard, all_blocks, complete):
        recipes = matrix.missing(block.recipes, read(options.json).get(block, {}))
        if options.only:
            recipes = [recipe for recipe in recipes if recipe.startswith("@") is (options.only == "peer")]
        if recipes and time.monotonic() - began < 60 * options.minutes:
            measure(block, recipes, options)
    found = read(options.json)
    header = ("shape", "layout", "dispatcher", "recipe", "step ms", "to BF16", "to the peer", "")
    print(timing.format_table(header, cells(found)))
    todo = {block: matrix.missing(block.recipes, found.get(block, {})) for block in all_blocks}
    for block, recipes in todo.items():
        if recipes:
            print(f"to measure: {' '.join(block)}: {', '.join(recipes)}")
    return 1 if any(todo.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
