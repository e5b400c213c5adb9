"""Whole steps of mixtures: recipe x format x dispatcher x expert-parallel ranks, beside megatron-core's loop.

    python benchmarks/expert_matrix.py --shard 1/7 --json FILE [--minutes 9]
    python benchmarks/expert_matrix.py --json FILE                (the table of what is measured)

A block is a shape, a layout and a dispatcher, with BF16, each recipe and the peer in turns (`gpu_layouts.py`). A shard
takes every Nth block, leaves out those that the file has, and starts none after `--minutes`: run the shards one after
the other, and again until nothing is missing. The peer has the dispatcher `alltoall`, and is in one block of a layout.

A cell counts as slower where its step takes more than 1 / 0.97 of BF16's, or of the peer's with the same recipe, in
every round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import timing

ONE, TWO = "1 GPU", "EP 2"
BASE = "bf16"
OURS = (BASE, "tensorwise-e4m3", "tensorwise", "delayed-e4m3", "delayed", "blockwise")
PEERS = ("@bf16", "@tensorwise", "@delayed", "@blockwise")
LIMIT = 0.97


class Block(NamedTuple):
    """What is measured in turns."""

    shape: str
    layout: str
    dispatcher: str

    def modes(self) -> list[str]:
        """As `gpu_layouts.py` takes them."""
        ours = [f"{recipe} --moe-token-dispatcher-type {self.dispatcher}" for recipe in OURS]
        return ours + (list(PEERS) if self.dispatcher in ("auto", "peer") else [])


def blocks(shapes: Sequence[str]) -> list[Block]:
    """All of them."""
    places = [(ONE, "auto"), *((TWO, dispatcher) for dispatcher in ("peer", "alltoall", "allgather"))]
    return [Block(shape, *place) for shape in shapes for place in places]


def measure(block: Block, options: argparse.Namespace) -> None:
    """Measure a block and append its rows to the file."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows")
        counts = ("--rounds", str(options.rounds), "--warm-up", str(options.warm_up), "--steps", str(options.steps))
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu_layouts.py"), "--shape", block.shape]
        subprocess.run(
            [*command, "--layouts", block.layout, *counts, "--json", rows, "--modes", *block.modes()], cwd=ROOT
        )
        found = rows.read_text().splitlines() if rows.exists() else []
    with options.json.open("a", encoding="utf-8") as lines:
        for row in found:
            lines.write(json.dumps({"block": block, "row": json.loads(row)}) + "\n")


def read(path: Path) -> dict[Block, list[dict[str, Any]]]:
    """The rows of each block."""
    found: dict[Block, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        found.setdefault(Block(*entry["block"]), []).append(entry["row"])
    return found


def steps_by_mode(rows: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Milliseconds of each round, by recipe; of the peer behind an @."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(f"@{row['recipe']}" if row["software"] == "mcore" else row["recipe"], []).append(
            row["step_ms"]
        )
    return found


def ratio(base: Optional[list[float]], mine: list[float]) -> Optional[timing.Ratio]:
    """How many times as fast, in the rounds that both have."""
    both = min(len(base or ()), len(mine))
    return timing.ratio_of(base[:both], mine[:both]) if base else None


def is_slower(speed: Optional[timing.Ratio]) -> bool:
    """In every round."""
    return speed is not None and speed.high < LIMIT


def cells(found: dict[Block, list[dict[str, Any]]]) -> list[tuple[Any, ...]]:
    """The table: a line for each recipe of each block, with a word where it is slower."""
    lines = []
    for block, rows in found.items():
        steps = steps_by_mode(rows)
        # The peer's steps are in another block of the same layout, whose rounds are not these: no ratio by rounds.
        for mode in (mode for mode in OURS if mode in steps):
            to_bf16 = ratio(steps.get(BASE), steps[mode]) if mode != BASE else None
            to_peer = ratio(steps.get(f"@{mode.removesuffix('-e4m3')}"), steps[mode])
            slow = [name for name, speed in (("BF16", to_bf16), ("the peer", to_peer)) if is_slower(speed)]
            lines.append(
                (*block, mode, min(steps[mode]), to_bf16, to_peer, f"slower than {' and '.join(slow)}" if slow else "")
            )
    return lines


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["M1", "M2", "M3"])
    parser.add_argument("--shard", help="I/N: measure every Nth block; default: only print the table")
    parser.add_argument("--minutes", type=float, default=9.0, help="no block is started after so long")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, required=True, help="file with the rows of all shards")
    options = parser.parse_args(argv)
    if options.shard:
        number, _, total = options.shard.partition("/")
        if not (number.isdigit() and total.isdigit() and 1 <= int(number) <= int(total)):
            parser.error(f"--shard {options.shard}: give I/N with 1 <= I <= N")
        options.number, options.total = int(number), int(total)
    return options


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit status 1 while blocks are missing."""
    options = parse(argv)
    began, todo = time.monotonic(), blocks(options.shapes)
    if options.shard:
        for block in todo[options.number - 1 :: options.total]:
            if block not in read(options.json) and time.monotonic() - began < 60 * options.minutes:
                measure(block, options)
    found = read(options.json)
    header = ("shape", "layout", "dispatcher", "recipe", "step ms", "to BF16", "to the peer", "")
    print(timing.format_table(header, cells(found)))
    missing = [" ".join(block) for block in todo if block not in found]
    if missing:
        print(f"not measured: {', '.join(missing)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
