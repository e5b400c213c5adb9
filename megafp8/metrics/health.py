"""One short function a rule: from the looks so far to what is wrong now.

A rule gets the newest looks, oldest first, and yields findings about the last one. What lasts for several looks is
told; what a single look shows may be chance. The bounds are the names in capitals: measured where that is said, else
experience. Measured are tensors of 512 x 512 values under every recipe: normal, Laplace, Student-t with 3 and 5 degrees
of freedom, rows or columns whose sizes differ by 1.5 octaves (standard deviation), one channel 64 times as large as the
others, squared ReLU, SwiGLU, and products of a normal and a log-normal number.

Findings as they come, each tensor's once, and all of them at the end.

What the looks at quantization say about a run's health, in plain words, with what to try.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Optional

from megafp8.config.precision_options import is_quantized_at
from megafp8.config.schema import RunConfig
from megafp8.metrics import health_advice
from megafp8.metrics.health_advice import Case, Problems, advice
from megafp8.metrics.records import EventRecord, QuantizationRecord, TensorStats

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
StatisticsRecords = Sequence[QuantizationRecord]


class HealthFinding(NamedTuple):
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
    find: Callable[[StatisticsRecords], Iterator[HealthFinding]]
    remedies: health_advice.Remedies


def lasting(looks: StatisticsRecords, name: str, count: int = LASTING) -> Optional[list[TensorStats]]:
    """A tensor in the last looks; None if it is not in all of them."""
    last = [look.tensors.get(name) for look in looks[-count:]]
    if len(last) < count or any(stats is None for stats in last):
        return None
    return [stats for stats in last if stats is not None]


def operands(look: QuantizationRecord) -> dict[str, TensorStats]:
    """The tensors of a look; in high precision those of the first recipe that is tried, of which the values count."""
    return look.tensors or next(iter(look.what_if.values()), {})


def find_not_finite(looks: StatisticsRecords) -> Iterator[HealthFinding]:
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
        yield HealthFinding(first, what + (others if count > 1 else ""))


def find_saturated(looks: StatisticsRecords) -> Iterator[HealthFinding]:
    """Values beyond what their scale expresses are cut off."""
    for name in looks[-1].tensors:
        last = lasting(looks, name)
        if last and all(is_saturated(stats) for stats in last):
            yield HealthFinding(name, f"{last[-1].saturated_fraction:.2%} of its values are cut off")


def is_saturated(stats: TensorStats) -> bool:
    """Is more of a tensor cut off than its format does to a healthy one?"""
    limit_db, local_db = MAX_DB_OF_SATURATED.get(stats.format), stats.mean_local_sqnr_db
    is_harmless = limit_db is not None and local_db is not None and local_db >= limit_db
    return (stats.saturated_fraction or 0) > MAX_SATURATED[stats.format] and not is_harmless


def find_underflow(looks: StatisticsRecords) -> Iterator[HealthFinding]:
    """Gradients become zero."""
    for name in looks[-1].tensors:
        last = lasting(looks, name) if ".grad_output" in name else None
        if last and all((stats.underflow_fraction or 0) > MAX_UNDERFLOW[stats.format] for stats in last):
            yield HealthFinding(name, f"{last[-1].underflow_fraction:.1%} of its values become zero")


def find_noise(looks: StatisticsRecords) -> Iterator[HealthFinding]:
    """Little is left of a tensor, whatever its largest values say."""
    for name in looks[-1].tensors:
        last = lasting(looks, name)
        levels = [stats.mean_local_sqnr_db for stats in last or () if stats.mean_local_sqnr_db is not None]
        if len(levels) == LASTING and all(level < MIN_LOCAL_DB for level in levels):
            yield HealthFinding(name, f"its values lie {levels[-1]:.1f} dB above their errors")


def find_moving_scales(looks: StatisticsRecords) -> Iterator[HealthFinding]:
    """Amaxes of inputs and weights, and scales with them, leap from look to look. Those of gradients do in any run."""
    for name in looks[-1].tensors:
        last = None if ".grad_output" in name else lasting(looks, name, LASTING + 1)
        if not last or any(stats.quant_scale_min is None for stats in last):
            continue
        amaxes = [max(stats.amax, 1e-38) for stats in last]
        factors = [max(after / before, before / after) for before, after in zip(amaxes, amaxes[1:], strict=False)]
        if all(factor > 2**MOVING_OCTAVES for factor in factors):
            yield HealthFinding(
                name, f"its amax went {' -> '.join(f'{amax:.3g}' for amax in amaxes)} from look to look"
            )


def find_stale_scales(looks: StatisticsRecords) -> Iterator[HealthFinding]:
    """Scales of delayed scaling no longer fit the tensor."""
    for name in looks[-1].tensors:
        last = lasting(looks, name)
        ages = [stats.staleness_octaves for stats in last] if last else []
        known = [age for age in ages if age is not None]
        if len(known) < LASTING:
            continue
        if all(age > STALE_OCTAVES for age in known):
            yield HealthFinding(name, f"its amax is {2 ** known[-1]:.3g} times what its scale was made for")
        elif all(age < LOOSE_OCTAVES for age in known):
            yield HealthFinding(name, f"its scale was made for {2 ** -known[-1]:.3g} times its amax: range is wasted")


def find_stalled_weights(looks: StatisticsRecords) -> Iterator[HealthFinding]:
    """Steps leave a weight where it is."""
    for name in looks[-1].tensors:
        last = lasting(looks, name)
        if not last or any(stats.update_to_weight is None for stats in last):
            continue
        if all(stats.update_to_weight < MIN_UPDATE_TO_WEIGHT for stats in last):
            yield HealthFinding(name, f"a step moves it by {last[-1].update_to_weight:.2g} of its norm")
        elif all((stats.codes_changed_fraction or 0) < MIN_CODES_CHANGED for stats in last):
            yield HealthFinding(
                name, f"a step changes {last[-1].codes_changed_fraction or 0:.2g} of its codes, though it moves it"
            )


def find_growing_outliers(looks: StatisticsRecords) -> Iterator[HealthFinding]:
    """One channel of the inputs grows away from the others."""
    for name in looks[-1].tensors:
        last = lasting(looks, name, GROWING) if ".input" in name else None
        if not last or len({stats.outlier_channel for stats in last}) > 1:
            continue
        octaves = [stats.outlier_octaves or 0.0 for stats in last]
        is_growing = all(after > before for before, after in zip(octaves, octaves[1:], strict=False))
        if is_growing and octaves[-1] >= OUTLIER_OCTAVES and octaves[-1] - octaves[0] >= OUTLIER_GROWTH:
            yield HealthFinding(
                name,
                f"channel {last[-1].outlier_channel} has {2 ** octaves[-1]:.3g} times the amax of the median channel, "
                f"{2 ** octaves[0]:.3g} times {GROWING - 1} looks ago",
            )


RULES: tuple[Rule, ...] = (
    Rule("numbers that are not finite", find_not_finite, health_advice.of_bad_numbers),
    Rule("saturation", find_saturated, health_advice.of_saturation),
    Rule("gradients underflow", find_underflow, health_advice.of_underflow),
    Rule("quantization noise", find_noise, health_advice.of_noise),
    Rule("scales still moving after warm-up", find_moving_scales, health_advice.of_moving_scales),
    Rule("stale delayed scales", find_stale_scales, health_advice.of_stale_scales),
    Rule("stalled weights", find_stalled_weights, health_advice.of_stalled_weights),
    Rule("an outlier channel grows", find_growing_outliers, health_advice.of_outliers),
)
AFTER_WARMUP = ("scales still moving after warm-up", "stalled weights")
EVENT = "health"
MAX_NAMED = 3
ONLY_TRIED = ", in high precision, asked for numbers that are not finite alone (other rules are about a run's recipe)"


class HealthMonitor:
    """Holds the rules against the newest looks.

    Args:
        config, world_size: of the run.
        of_machine: see `advice.Case`.
        warmup_steps: of the learning rate; some rules wait for its end.
    """

    def __init__(
        self, config: RunConfig, world_size: int = 1, warmup_steps: float = 0,
        of_machine: Problems = lambda config: [],
    ):  # fmt: skip
        self.config, self.world_size, self.warmup_steps = config, world_size, warmup_steps
        self.of_machine = of_machine
        self.looks: deque[QuantizationRecord] = deque(maxlen=GROWING)
        self.num_looks = 0
        self.first_seen: dict[str, dict[str, int]] = {rule.name: {} for rule in RULES}

    def look(self, record: QuantizationRecord) -> list[EventRecord]:
        """What a look shows for the first time, an event a rule."""
        self.looks.append(record)
        self.num_looks += 1
        events = []
        for rule in RULES:
            looks = [each for each in self.looks if rule.name not in AFTER_WARMUP or each.step > self.warmup_steps]
            seen = self.first_seen[rule.name]
            new = [finding for finding in (rule.find(looks) if looks else ()) if finding.tensor not in seen]
            seen.update((finding.tensor, record.step) for finding in new)
            if new:
                case = Case(self.config, self.world_size, linear_of(new[0].tensor), self.of_machine)
                tried = advice(case, rule.remedies)
                detail = f"{rule.name}: {listed(new)}" + (f"; try: {tried}" if tried else "")
                events.append(EventRecord(step=record.step, name=EVENT, detail=detail))
        return events

    def summary(self, first_step: int, last_step: int) -> EventRecord:
        """Everything that was found, in a line, and what it was found in.

        Args:
            first_step, last_step: the steps that were made.
        """
        if not self.num_looks:
            why = self.why_no_look(first_step, last_step)
            return EventRecord(step=last_step, name=EVENT, detail=f"no look at quantization: {why}")
        parts = [
            f"{rule} ({len(seen)} tensors, first at step {min(seen.values())})"
            for rule, seen in self.first_seen.items()
            if seen
        ]
        looks = f"{self.num_looks} look{'s' if self.num_looks > 1 else ''} at quantization"
        tensors = f"{len(operands(self.looks[-1]))} tensors{'' if self.looks[-1].tensors else ONLY_TRIED}"
        detail = f"{looks}, {tensors}: {'; '.join(parts) or 'nothing to report'}"
        return EventRecord(step=last_step, name=EVENT, detail=detail)

    def why_no_look(self, first_step: int, last_step: int) -> str:
        """Why no step was looked at."""
        interval, precision = self.config.logging.fp8_log_interval, self.config.precision
        assert interval is not None
        steps = f"steps {first_step} to {last_step}"
        if not any(step % interval == 0 for step in range(first_step, last_step + 1)):
            return f"none of the {steps} is a multiple of --fp8-log-interval {interval}; give a shorter one"
        if not any(is_quantized_at(precision, step) for step in range(first_step, last_step + 1)):
            return f"--fp8-schedule {precision.fp8_schedule} has the {steps} in high precision"
        return (
            f"--fp8-schedule {precision.fp8_schedule} has those of the {steps} in high precision that are multiples of "
            f"--fp8-log-interval {interval}; give a shorter one"
        )


def linear_of(tensor: str) -> str:
    """`layers.3.linear_fc1` of `layers.3.linear_fc1.input.row`."""
    return re.split(r"\.(?:input|weight|grad_output)\b", tensor)[0]


def listed(findings: Sequence[HealthFinding]) -> str:
    """The first findings, and how many more there are."""
    text = "; ".join(f"{finding.tensor}: {finding.what}" for finding in findings[:MAX_NAMED])
    more = len(findings) - MAX_NAMED
    return f"{text}; and {more} more" if more > 0 else text
