"""Splitting and rotating queries, keys and values: the kernel, compared with the bytes that it must move.

    python benchmarks/gpu_rope.py [--sweep]

Forward and backward at the shapes of `gpu_train.py`, one layer; every element is read once and written once. Backward
also with the amax of its output, including the initialization of the amax with zero.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks import timing
from benchmarks.gpu_adam import copy_bandwidth, seconds
from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.kernels import rope

SHAPES = {"A": (2048, 8, 16, 16, 128), "B": (4096, 2, 32, 8, 128)}


BLOCKS = ((16, 4, 4), (16, 1, 4), (16, 2, 4), (16, 8, 4), (8, 4, 4), (8, 8, 4), (8, 4, 2), (32, 4, 8), (32, 2, 4))


def measured(shape: tuple[int, int, int, int, int]) -> dict[str, tuple[float, float]]:
    """Milliseconds and TB/s of each way."""
    length, batch, heads, groups, dim = shape
    joined = torch.randn(length, batch, (heads + 2 * groups) * dim, device="cuda").bfloat16()
    angles = torch.rand(length, 1, 1, dim, device="cuda")
    parts = rope.split_and_rotate(joined, angles, heads, groups)
    found = {}
    forward, backward = rope.split_and_rotate_kernel, rope.rotate_back_and_join_kernel
    calls = {
        "split_and_rotate": lambda: rope.launch(forward, joined, angles, *parts),
        "rotate_back_and_join": lambda: rope.launch(backward, joined, angles, *parts, None),
        "rotate_back_and_join, amax": lambda: rope.launch(
            backward, joined, angles, *parts, torch.zeros(1, device="cuda")
        ),
    }
    for way, call in calls.items():
        time_s = seconds(call)
        found[way] = (time_s * 1e3, 2 * joined.nbytes / time_s / 1e12)
    return found


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="also other sizes of a program")
    blocks = BLOCKS if parser.parse_args(argv).sweep else BLOCKS[:1]
    cells = [("copy of 1 GiB", "", "", copy_bandwidth())]
    for block in blocks:
        rope.TOKENS, rope.GROUPS, rope.NUM_WARPS = block
        for name, shape in SHAPES.items():
            cells += [(f"{name} {way}", "x".join(map(str, block)), *row) for way, row in measured(shape).items()]
    print(timing.format_table(("what", "tokens x groups x warps", "ms", "TB/s"), cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
