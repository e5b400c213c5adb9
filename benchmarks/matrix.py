"""What the matrices (`expert_matrix.py`, `gpu_matrix.py`) share: shards, rounds, and what counts as slower.

A block has sides that are measured one after the other: BF16, recipes, and behind an @ the peer's recipes. A side is
compared with BF16 and with the peer's same recipe. It counts as slower where its speed is below `LIMIT` of theirs in
`ROUNDS` rounds; where it is in the first one, it is measured again, beside what it is compared with.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Optional, TypeVar

BASE = "bf16"
LIMIT, ROUNDS = 0.97, 2

Steps = dict[str, list[float]]
"""Milliseconds of each round, by side; of the peer behind an @."""
Block = TypeVar("Block")


def compared(steps: Steps, side: str) -> Iterator[tuple[str, list[float]]]:
    """What a side of megafp8 must not be slower than: its name, and its steps."""
    if side != BASE and BASE in steps:
        yield BASE, steps[BASE]
    peers = (f"@{side}", f"@{side.removesuffix('-e4m3')}")
    if (peer := next((name for name in peers if name in steps), None)) is not None:
        yield peer, steps[peer]


def speeds(steps: Steps, side: str) -> dict[str, float]:
    """How many times as fast a side is as what it is compared with, by their medians."""
    return {name: statistics.median(base) / statistics.median(steps[side]) for name, base in compared(steps, side)}


def slow_rounds(mine: list[float], base: list[float]) -> int:
    """Rounds in which it is slower, or -1 if it is not in one of them.

    One of both may have more rounds, for the sake of others: compared are the first ones, and the last ones.
    """
    rounds = min(len(mine), len(base))
    both = zip(*([times[0], *times[len(times) - rounds + 1 :]] for times in (mine, base)), strict=True)
    slow = [theirs / ours < LIMIT for ours, theirs in both]
    return rounds if all(slow) else -1


def slower_than(steps: Steps, side: str) -> list[str]:
    """What a side is slower than, in enough rounds."""
    return [name for name, base in compared(steps, side) if slow_rounds(steps[side], base) >= ROUNDS]


def missing(sides: Sequence[str], steps: Steps, failed: Collection[str] = ()) -> list[str]:
    """Sides to measure: those without a row, or else those in doubt, with what they are compared with."""
    if lacking := [side for side in sides if side not in steps and side not in failed]:
        return lacking
    doubtful = dict[str, None]()
    for side in (side for side in sides if side in steps and not side.startswith("@")):
        for name, base in compared(steps, side):
            if 0 < slow_rounds(steps[side], base) < ROUNDS and not {name, side} & set(failed):
                doubtful |= dict.fromkeys((name, side))
    return list(doubtful)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of a matrix in shards."""
    parser.add_argument("--shard", type=shard_argument, metavar="I/N", help="measure every Nth block; default: none")
    parser.add_argument("--minutes", type=float, default=9.0, help="nothing is started after so long")


def shard_argument(text: str) -> tuple[int, int]:
    """Number and count of the shards.

    Raises:
        argparse.ArgumentTypeError: it is none of them.
    """
    number, _, total = text.partition("/")
    if not (number.isdigit() and total.isdigit() and 1 <= int(number) <= int(total)):
        raise argparse.ArgumentTypeError(f"{text}: give I/N with 1 <= I <= N")
    return int(number), int(total)


def blocks_of(shard: Optional[tuple[int, int]], blocks: Sequence[Block], complete: Iterable[Block]) -> list[Block]:
    """The blocks of a shard. Second rounds, of blocks that have all first ones, come last."""
    if shard is None:
        return []
    later = list(complete)
    return sorted(blocks[shard[0] - 1 :: shard[1]], key=lambda block: block in later)
