"""Remarks on a plan: nearby numbers of GPUs that are much faster, and recipes that the plan cannot rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megafp8.config import derived
from megafp8.config.expert_layers import is_mixture
from megafp8.config.schema import RunConfig
from megafp8.device.gpus import Gpu
from megafp8.planning.layouts import LayoutSearch
from megafp8.utils.integers import round_up

GPUS_PER_NODE, GPUS_PER_NODE_GROUP = 8, 64
NEARBY_FRACTION = 1 / 4
"""Other numbers of GPUs are searched within this fraction of the requested one."""
MIN_SPEEDUP = 1.1
"""Speedup per GPU from which another number of GPUs gets a remark."""
HOST_FRACTION = 0.05
"""Host-bound fraction of a step from which the ranking of recipes is not reliable."""


def nearby_counts(world_size: int) -> list[int]:
    """Nearby numbers of GPUs that divide better: full and half nodes, or full and half groups of nodes."""
    unit = GPUS_PER_NODE if world_size % GPUS_PER_NODE else GPUS_PER_NODE_GROUP
    counts = {
        count
        for size in (unit // 2, unit)
        for count in (world_size // size * size, round_up(world_size, size))
    }  # fmt: skip
    return sorted(
        count for count in counts - {0, world_size} if abs(count - world_size) <= NEARBY_FRACTION * world_size
    )


def gpu_count_remarks(search: LayoutSearch, nearby: Mapping[int, LayoutSearch]) -> Iterator[str]:
    """A remark if other numbers of GPUs are much faster per GPU than the requested one."""
    count, speed = search.world_size, _best_speed(search)
    speeds = {other: _best_speed(at) for other, at in nearby.items() if at.layouts}
    faster = {other: theirs for other, theirs in speeds.items() if theirs >= MIN_SPEEDUP * speed}
    if not faster:
        return
    alternatives = ", ".join(
        f"{other:,} GPUs give {other * theirs:,.0f}" + (f" ({theirs / speed - 1:+.0%} per GPU)" if speed else "")
        for other, theirs in faster.items()
    )
    text = f"{count:,} GPUs {factor_text(count)}: in total they give {count * speed:,.0f} tokens/s"
    is_fewer = any(other < count and other * theirs > count * speed for other, theirs in faster.items())
    yield f"{text}; {alternatives}" + (": more with fewer GPUs" if is_fewer else "")


def _best_speed(search: LayoutSearch) -> float:
    """Tokens/s per GPU of the fastest layout; 0 if none fits."""
    return search.layouts[0].step.tokens_per_s_per_gpu if search.layouts else 0.0


def factor_text(count: int) -> str:
    """Why few layouts are possible on this number of GPUs."""
    odd = count // (count & -count)
    factor = next((divisor for divisor in range(3, int(odd**0.5) + 1, 2) if odd % divisor == 0), odd)
    if factor == count:
        return f"are a prime number, which can only be divided as 1 x {count:,}"
    return f"have the odd factor {odd:,}, which few layouts can use"


def ranking_remarks(config: RunConfig, gpu: Gpu, search: LayoutSearch) -> Iterator[str]:
    """Remarks on recipes whose speed relative to others the plan does not know."""
    for recipe in derived.used_recipes(config.precision):
        if not recipe.native_capabilities:
            rate = "FP8" if recipe.multiplies_codes(gpu.compute_capability) else "BF16"
            yield (
                f"{recipe.name}: not supported by Transformer Engine, so layers are emulated; planned with GEMMs at "
                f"the speed of {rate}, and its casts were not measured in a complete step"
            )
    if gpu.compute_capability < (10, 0):
        return
    if is_mixture(config.model):
        yield (
            f"recipes of mixtures of experts are not ranked on {gpu.name}, because no measured or published speed of "
            "their grouped GEMMs is available"
        )
    unknown = [recipe.name for recipe in derived.used_recipes(config.precision) if not recipe.is_ranked_on_blackwell]
    if unknown:
        yield (
            f"{' and '.join(unknown)}: not ranked on {gpu.name}, because no measured or published speed is available: "
            "another recipe may be faster"
        )
    step = search.layouts[0].step if search.layouts else None
    host_fraction = step.parts.get("host", 0.0) / step.seconds if step else 0.0
    if host_fraction > HOST_FRACTION:
        yield (
            f"recipes are not ranked where layers wait for the host ({host_fraction:.0%} of layout 1's step): launch "
            f"times were measured on the host of an H200, not of a {gpu.name}"
        )
