"""What the figures of a plan do not say: that a few GPUs more or fewer do better, and what the plan does not rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.device.gpus import Gpu
from megafp8.planning.layouts import Found

NODE, NODES = 8, 64
NEAR_FRACTION = 1 / 4
"""Of the number of GPUs: as far as other numbers are looked for."""
MUCH_FASTER = 1.1
"""A GPU, at another number of them, that is worth a remark."""
HOST_FRACTION = 0.05
"""Of a step: what the host may cost before the order of recipes rests on it."""


def nearby_counts(world_size: int) -> list[int]:
    """Numbers of GPUs near one that is hard to divide: whole and half nodes, or groups of nodes near whole nodes."""
    unit = NODE if world_size % NODE else NODES
    counts = {
        count
        for size in (unit // 2, unit)
        for count in (world_size // size * size, -(-world_size // size) * size)
    }  # fmt: skip
    return sorted(count for count in counts - {0, world_size} if abs(count - world_size) <= NEAR_FRACTION * world_size)


def count_remarks(found: Found, nearby: Mapping[int, Found]) -> Iterator[str]:
    """That other numbers of GPUs are much faster, a GPU, than the one that was asked for."""
    count = found.world_size
    ours = found.layouts[0].step.tokens_per_s_per_gpu if found.layouts else 0.0
    others = {other: at.layouts[0].step.tokens_per_s_per_gpu for other, at in nearby.items() if at.layouts}
    better = {other: speed for other, speed in others.items() if speed >= MUCH_FASTER * ours}
    if not better:
        return
    give = ", ".join(
        f"{other:,} GPUs give {other * speed:,.0f}" + (f" ({speed / ours - 1:+.0%} a GPU)" if ours else "")
        for other, speed in better.items()
    )
    text = f"{count:,} GPUs {hard_to_divide(count)}: in all they give {count * ours:,.0f} tokens/s"
    fewer = any(other < count and other * speed > count * ours for other, speed in better.items())
    yield f"{text}; {give}" + (": more with fewer GPUs" if fewer else "")


def hard_to_divide(count: int) -> str:
    """Why few layouts fit a number."""
    odd = count // (count & -count)
    factor = next((divisor for divisor in range(3, int(odd**0.5) + 1, 2) if odd % divisor == 0), odd)
    if factor == count:
        return f"are a prime number, which divides into 1 x {count:,} only"
    return f"have the odd factor {odd:,}, which few layouts can use"


def ranking_remarks(config: RunConfig, gpu: Gpu, found: Found) -> Iterator[str]:
    """Which order among recipes the plan does not know."""
    for recipe in derived.used_recipes(config.precision):
        if not recipe.native_capabilities:
            rate = "FP8" if recipe.multiplies_codes(gpu.compute_capability) else "BF16"
            yield (
                f"{recipe.name}: not in Transformer Engine, so the emulated layers run it; planned with GEMMs at "
                f"{rate}'s rate, and its casts are not measured in a whole step"
            )
    if gpu.compute_capability < (10, 0):
        return
    unknown = [recipe.name for recipe in derived.used_recipes(config.precision) if not recipe.is_ranked_on_blackwell]
    if unknown:
        yield (
            f"{' and '.join(unknown)}: not ranked on {gpu.name}, where nobody has measured or published the speed: "
            "this plan does not tell whether another recipe is faster"
        )
    step = found.layouts[0].step if found.layouts else None
    share = step.parts.get("host", 0.0) / step.seconds if step else 0.0
    if share > HOST_FRACTION:
        yield (
            f"recipes are not ranked where layers wait for the host ({share:.0%} of layout 1's step): its time was "
            f"measured beside an H200, not a {gpu.name}"
        )
