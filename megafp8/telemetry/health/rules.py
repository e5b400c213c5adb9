"""One short function a rule: from the looks so far to what is wrong now.

A rule gets the newest looks, oldest first, and yields findings about the last one. What lasts for several looks is
told; what a single look shows may be chance. The bounds are the names in capitals: experience, not theory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Optional

from megafp8.telemetry.records import QuantizationRecord, TensorStats

MOVING_OCTAVES = 1.0  # more than twice or less than half of the look before
MAX_SATURATED = 1e-3
MAX_UNDERFLOW = 0.05
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
    mend: str


def lasting(looks: Looks, name: str, count: int = LASTING) -> Optional[list[TensorStats]]:
    """A tensor in the last looks; None if it is not in all of them."""
    last = [look.tensors.get(name) for look in looks[-count:]]
    if len(last) < count or any(stats is None for stats in last):
        return None
    return [stats for stats in last if stats is not None]


def find_not_finite(looks: Looks) -> Iterator[Finding]:
    """The first tensor in the order of the forward pass that has numbers that are not finite; else the first in that of
    the backward pass."""
    bad = [name for name, stats in looks[-1].tensors.items() if stats.num_non_finite]
    forward = [name for name in bad if ".grad_output" not in name]
    first = forward[0] if forward else bad[-1] if bad else None
    if first is not None:
        count = looks[-1].tensors[first].num_non_finite
        yield Finding(first, f"{count} values are not finite, and {len(bad)} tensors in all have such")


def find_saturated(looks: Looks) -> Iterator[Finding]:
    """Values beyond what their scale expresses are cut off."""
    for name in looks[-1].tensors:
        last = lasting(looks, name)
        if last and all((stats.saturated_fraction or 0) > MAX_SATURATED for stats in last):
            yield Finding(name, f"{last[-1].saturated_fraction:.2%} of its values are cut off")


def find_underflow(looks: Looks) -> Iterator[Finding]:
    """Gradients become zero."""
    for name in looks[-1].tensors:
        last = lasting(looks, name) if ".grad_output" in name else None
        if last and all((stats.underflow_fraction or 0) > MAX_UNDERFLOW for stats in last):
            yield Finding(name, f"{last[-1].underflow_fraction:.1%} of its values become zero")


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
    Rule(
        "numbers that are not finite",
        find_not_finite,
        "resume from a checkpoint before it with a lower --lr, a longer --lr-warmup-iters or a lower --clip-grad",
    ),
    Rule(
        "saturation",
        find_saturated,
        "--fp8-recipe tensorwise, whose scales come from the tensor at hand; with delayed scaling --fp8-margin 1, or a "
        "longer --fp8-amax-history-len with --fp8-amax-compute-algo max",
    ),
    Rule(
        "gradients underflow",
        find_underflow,
        "--fp8-format hybrid, whose gradients reach further down, or a recipe of blocks: --fp8-what-if mxfp8,blockwise "
        "shows what they would do",
    ),
    Rule(
        "scales still moving after warm-up",
        find_moving_scales,
        "a lower --lr or a longer --lr-warmup-iters; with delayed scaling --fp8-recipe tensorwise, which follows at "
        "once",
    ),
    Rule(
        "stale delayed scales",
        find_stale_scales,
        "--fp8-recipe tensorwise, or another --fp8-amax-history-len: a short one follows, a long one with "
        "--fp8-amax-compute-algo max keeps room",
    ),
    Rule(
        "stalled weights",
        find_stalled_weights,
        "look at --lr and its schedule at this step, --clip-grad, and whether gradients of the layer underflow",
    ),
    Rule(
        "an outlier channel grows",
        find_growing_outliers,
        "a recipe of blocks, which keeps it to itself (--fp8-what-if mxfp8,blockwise shows how well); --qk-layernorm, "
        "more --weight-decay, or --first-last-layers-bf16 where it is in those",
    ),
)
AFTER_WARMUP = ("scales still moving after warm-up", "stalled weights")
