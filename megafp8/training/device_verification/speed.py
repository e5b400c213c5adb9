"""Speed of native linears, casts included, against BF16."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from megafp8.training.device_verification.native import NativeLayers

# Tokens, inputs, outputs: so large that the GPU, and not the start of its kernels from Python, takes the time.
SIZES = ((16384, 8192, 8192), (8192, 4096, 14336))
ROUNDS = 20


@dataclass(frozen=True)
class LinearSpeed:
    """Forward and backward pass of one linear.

    Attributes:
        recipe: None is BF16.
        sizes: tokens, inputs, outputs.
        ms: median.
        speedup: BF16's median over this one.
    """

    recipe: Optional[str]
    sizes: tuple[int, int, int]
    ms: float
    speedup: float


def measure_speed(
    native: NativeLayers, formats: dict[str, str], sizes: Sequence[tuple[int, int, int]] = SIZES, rounds: int = ROUNDS
) -> list[LinearSpeed]:
    """Time all recipes and BF16, interleaved.

    Args:
        formats: number formats by recipe.
    """
    found = []
    for each in sizes:
        times = native.step_times(dict([(None, ""), *formats.items()]), each, rounds)
        medians = {name: statistics.median(values) for name, values in times.items()}
        found += [LinearSpeed(name, each, ms, medians[None] / ms) for name, ms in medians.items()]
    return found
