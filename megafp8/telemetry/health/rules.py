"""One short function a rule: from the looks so far to what is wrong now.

A rule gets the newest looks, oldest first, and yields findings about the last one. What lasts for several looks is
told; what a single look shows may be chance. The bounds are the names in capitals: measured where that is said, else
experience. Measured are tensors of 512 x 512 values under every recipe: normal, Laplace, Student-t with 3 and 5 degrees
of freedom, rows or columns whose sizes differ by 1.5 octaves (standard deviation), one channel 64 times as large as the
others, squared ReLU, SwiGLU, and products of a normal and a log-normal number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Optional

from megafp8.telemetry.health import advice
from megafp8.telemetry.records import QuantizationRecord, TensorStats

MOVING_OCTAVES = 1.0  # more than twice or less than half of the look before
# Scales of FP8 that come from the tensor at hand cut nothing off (measured: 0), so that this is about delayed scaling.
# NVFP4's are E4M3 numbers, and every other one is rounded down: of 16 values in a block the largest is cut off then, by
# at most 1/17, which is less than E2M1 rounds by. 3.1 to 4.9% of healthy tensors (0.2 to 0.3% of weights in 16 x 16
# blocks), and all of a block whose values are alike: the share means nothing as long as the tensor survives it.
MAX_SATURATED = {"e4m3": 1e-3, "e5m2": 1e-3, "e2m1": 1 / 16}
MAX_DB_OF_SATURATED = {"e2m1": 14.0}  # measured in blocks of 16: 16.8 dB and more, where gradients round by chance, too
# Of values that are not zero. Measured in FP8: up to 0.04%. E2M1 loses what is below 1/24 of its block's largest value:
# 7% of normal numbers, 13% of Laplace's, 28% of products with a log-normal number.
MAX_UNDERFLOW = {"e4m3": 0.05, "e5m2": 0.05, "e2m1": 0.5}
# Measured over runs of 32 neighbours: 17 to 23 dB in E2M1, 14 in its 16 x 16 blocks where rows differ; over whole
# tensors 31 in E4M3, 25 in E5M2. At 10 dB the error is a third of the values.
MIN_LOCAL_DB = 10.0
MIN_UPDATE_TO_WEIGHT = 1e-7  # FP32 master weights no longer take such an update
MIN_CODES_CHANGED = 1e-6
OUTLIER_OCTAVES, OUTLIER_GROWTH = 5.0, 1.0
STALE_OCTAVES, LOOSE_OCTAVES = 1.0, -3.0
LASTING = 2  # looks in a row
GROWING = 4  # looks over which an outlier grows

Looks = Sequence[QuantizationRecord]


class Finding(NamedTuple):
    """Something that is wrong.

    Attributes:
        tensor: which.
        what: the values.
    """

    tensor: str
    what: str


class Rule(NamedTuple):
    """A rule, what it is called in records, and what to try."""

    name: str
    find: Callable[[Looks], Iterator[Finding]]
    remedies: advice.Remedies


def lasting(looks: Looks, name: str, count: int = LASTING) -> Optional[list[TensorStats]]:
    """A tensor in the last looks; None if it is not in all of them."""
    last = [look.tensors.get(name) for look in looks[-count:]]
    if len(last) < count or any(stats is None for stats in last):
        return None
    return [stats for stats in last if stats is not None]


def operands(look: QuantizationRecord) -> dict[str, TensorStats]:
    """The tensors of a look; in high precision those of the first recipe that is tried, of which the values count."""
    return look.tensors or next(iter(look.what_if.values()), {})


def find_not_finite(looks: Looks) -> Iterator[Finding]:
    """The first tensor in the order of the forward pass that has numbers that are not finite; else the first in that of
    the backward pass."""
    tensors = operands(looks[-1])
    bad = [name for name, stats in tensors.items() if stats.num_non_finite]
    forward = [name for name in bad if ".grad_output" not in name]
    if bad:
        first, order = (forward[0], "forward") if forward else (bad[-1], "backward")
        what = f"{tensors[first].num_non_finite} values are not finite"
        count = len({name.removesuffix(".row").removesuffix(".col") for name in bad})
        others = f"; of {count} such operands of linears the first in the order of the {order} pass"
        yield Finding(first, what + (others if count > 1 else ""))


def find_saturated(looks: Looks) -> Iterator[Finding]:
    """Values beyond what their scale expresses are cut off."""
    for name in looks[-1].tensors:
        last = lasting(looks, name)
        if last and all(is_saturated(stats) for stats in last):
            yield Finding(name, f"{last[-1].saturated_fraction:.2%} of its values are cut off")


def is_saturated(stats: TensorStats) -> bool:
    """Is more of a tensor cut off than its format does to a healthy one?"""
    limit_db, local_db = MAX_DB_OF_SATURATED.get(stats.format), stats.mean_local_sqnr_db
    is_harmless = limit_db is not None and local_db is not None and local_db >= limit_db
    return (stats.saturated_fraction or 0) > MAX_SATURATED[stats.format] and not is_harmless


def find_underflow(looks: Looks) -> Iterator[Finding]:
    """Gradients become zero."""
    for name in looks[-1].tensors:
        last = lasting(looks, name) if ".grad_output" in name else None
        if last and all((stats.underflow_fraction or 0) > MAX_UNDERFLOW[stats.format] for stats in last):
            yield Finding(name, f"{last[-1].underflow_fraction:.1%} of its values become zero")


def find_noise(looks: Looks) -> Iterator[Finding]:
    """Little is left of a tensor, whatever its largest values say."""
    for name in looks[-1].tensors:
        last = lasting(looks, name)
        levels = [stats.mean_local_sqnr_db for stats in last or () if stats.mean_local_sqnr_db is not None]
        if len(levels) == LASTING and all(level < MIN_LOCAL_DB for level in levels):
            yield Finding(name, f"its values lie {levels[-1]:.1f} dB above their errors")


def find_moving_scales(looks: Looks) -> Iterator[Finding]:
    """Amaxes of inputs and weights, and scales with them, leap from look to look. Those of gradients do in any run."""
    for name in looks[-1].tensors:
        last = None if ".grad_output" in name else lasting(looks, name, LASTING + 1)
        if not last or any(stats.quant_scale_min is None for stats in last):
            continue
        amaxes = [max(stats.amax, 1e-38) for stats in last]
        factors = [max(after / before, before / after) for before, after in zip(amaxes, amaxes[1:], strict=False)]
        if all(factor > 2**MOVING_OCTAVES for factor in factors):
            yield Finding(name, f"its amax went {' -> '.join(f'{amax:.3g}' for amax in amaxes)} from look to look")


def find_stale_scales(looks: Looks) -> Iterator[Finding]:
    """Scales of delayed scaling no longer fit the tensor."""
    for name in looks[-1].tensors:
        last = lasting(looks, name)
        ages = [stats.staleness_octaves for stats in last] if last else []
        known = [age for age in ages if age is not None]
        if len(known) < LASTING:
            continue
        if all(age > STALE_OCTAVES for age in known):
            yield Finding(name, f"its amax is {2 ** known[-1]:.3g} times what its scale was made for")
        elif all(age < LOOSE_OCTAVES for age in known):
            yield Finding(name, f"its scale was made for {2 ** -known[-1]:.3g} times its amax: range is wasted")


def find_stalled_weights(looks: Looks) -> Iterator[Finding]:
    """Steps leave a weight where it is."""
    for name in looks[-1].tensors:
        last = lasting(looks, name)
        if not last or any(stats.update_to_weight is None for stats in last):
            continue
        if all(stats.update_to_weight < MIN_UPDATE_TO_WEIGHT for stats in last):
            yield Finding(name, f"a step moves it by {last[-1].update_to_weight:.2g} of its norm")
        elif all((stats.codes_changed_fraction or 0) < MIN_CODES_CHANGED for stats in last):
            yield Finding(
                name, f"a step changes {last[-1].codes_changed_fraction or 0:.2g} of its codes, though it moves it"
            )


def find_growing_outliers(looks: Looks) -> Iterator[Finding]:
    """One channel of the inputs grows away from the others."""
    for name in looks[-1].tensors:
        last = lasting(looks, name, GROWING) if ".input" in name else None
        if not last or len({stats.outlier_channel for stats in last}) > 1:
            continue
        octaves = [stats.outlier_octaves or 0.0 for stats in last]
        is_growing = all(after > before for before, after in zip(octaves, octaves[1:], strict=False))
        if is_growing and octaves[-1] >= OUTLIER_OCTAVES and octaves[-1] - octaves[0] >= OUTLIER_GROWTH:
            yield Finding(
                name,
                f"channel {last[-1].outlier_channel} has {2 ** octaves[-1]:.3g} times the amax of the median channel, "
                f"{2 ** octaves[0]:.3g} times {GROWING - 1} looks ago",
            )


RULES: tuple[Rule, ...] = (
    Rule("numbers that are not finite", find_not_finite, advice.of_bad_numbers),
    Rule("saturation", find_saturated, advice.of_saturation),
    Rule("gradients underflow", find_underflow, advice.of_underflow),
    Rule("quantization noise", find_noise, advice.of_noise),
    Rule("scales still moving after warm-up", find_moving_scales, advice.of_moving_scales),
    Rule("stale delayed scales", find_stale_scales, advice.of_stale_scales),
    Rule("stalled weights", find_stalled_weights, advice.of_stalled_weights),
    Rule("an outlier channel grows", find_growing_outliers, advice.of_outliers),
)
AFTER_WARMUP = ("scales still moving after warm-up", "stalled weights")
