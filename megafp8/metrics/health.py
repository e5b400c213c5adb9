"""Health rules: what the quantization statistics of a run show to be wrong, and the events that report it.

Each rule is a function from the newest statistics records, oldest first, to warnings about the last one. Most rules
need the same warning in several statistics steps in a row, since a single step may show chance.

The thresholds are the constants in capitals. Where a comment says "measured", they come from tensors of 512 x 512
values under every recipe: normal, Laplace, Student-t with 3 and 5 degrees of freedom, rows or columns whose magnitudes
differ by 1.5 octaves (standard deviation), one channel 64 times as large as the others, squared ReLU, SwiGLU, and
products of a normal and a log-normal number. The other thresholds are experience.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megafp8.config.health_case import HealthCase
from megafp8.config.precision_schedule import is_quantized_at
from megafp8.metrics import health_suggestions
from megafp8.metrics.records import EventRecord, QuantizationRecord, TensorStats, linear_of

MOVING_OCTAVES = 1.0  # more than twice or less than half of the amax before
# FP8 scales made from the current amax saturate nothing (measured: 0), so in FP8 this is about delayed scaling. NVFP4's
# block scales are E4M3, and every other one is rounded down. The largest of the 16 values of a block then saturates, by
# at most 1/17, which is less than the rounding error of E2M1. Measured: 3.1 to 4.9% of healthy tensors, 0.2 to 0.3% of
# weights in 16 x 16 blocks, and all values of a block whose values are alike. So in E2M1 the fraction counts only where
# the local SQNR is low, too.
MAX_SATURATED = {"e4m3": 1e-3, "e5m2": 1e-3, "e2m1": 1 / 16}
MAX_DB_OF_SATURATED = {"e2m1": 14.0}  # measured in blocks of 16: at least 16.8 dB, also with stochastic rounding
# Of nonzero values. Measured in FP8: up to 0.04%. E2M1 underflows below 1/24 of the block's amax: 7% of normal numbers,
# 13% of Laplace's, 28% of products with a log-normal number.
MAX_UNDERFLOW = {"e4m3": 0.05, "e5m2": 0.05, "e2m1": 0.5}
# Measured over runs of 32 neighbours: 17 to 23 dB in E2M1, 14 dB in 16 x 16 blocks where rows differ; over complete
# tensors 31 dB in E4M3 and 25 dB in E5M2. At 10 dB the error is a third of the values.
MIN_LOCAL_DB = 10.0
MIN_UPDATE_TO_WEIGHT = 1e-7  # below, FP32 master weights no longer change
MIN_CODES_CHANGED = 1e-6
OUTLIER_OCTAVES, OUTLIER_GROWTH = 5.0, 1.0
STALE_OCTAVES, LOOSE_OCTAVES = 1.0, -3.0
NUM_LASTING = 2  # statistics steps in a row
NUM_GROWING = 4  # statistics steps over which an outlier grows
EVENT = "health"
MAX_NAMED = 3
ONLY_WHAT_IF = ", in high precision, checked for non-finite values only (the other rules apply to quantized layers)"
StatisticsRecords = Sequence[QuantizationRecord]


class HealthWarning(NamedTuple):
    """What is wrong with a tensor, with the values that show it."""

    tensor: str
    what: str


class Rule(NamedTuple):
    """A rule, its name in records, and what to try against its warnings."""

    name: str
    find: Callable[[StatisticsRecords], Iterator[HealthWarning]]
    suggestions: health_suggestions.Suggestions
    waits_for_warmup: bool = False


def recent_stats(
    records: StatisticsRecords, count: int = NUM_LASTING
) -> Iterator[tuple[str, list[TensorStats]]]:  # fmt: skip
    """Name and statistics, oldest first, of each tensor that is in all of the last `count` records."""
    last = records[-count:]
    for name in last[-1].tensors:
        stats = [record.tensors[name] for record in last if name in record.tensors]
        if len(stats) == count:
            yield name, stats


def tensors_of(record: QuantizationRecord) -> Mapping[str, TensorStats]:
    """The tensors of a record; in high precision those of the first what-if recipe, whose values are the run's."""
    return record.tensors or next(iter(record.what_if.values()), {})


def find_nonfinite(records: StatisticsRecords) -> Iterator[HealthWarning]:
    """The first tensor with non-finite values in the order of the forward pass, else in that of the backward pass."""
    tensors = tensors_of(records[-1])
    bad = [name for name, stats in tensors.items() if stats.num_non_finite]
    forward = [name for name in bad if ".grad_output" not in name]
    if bad:
        first, order = (forward[0], "forward") if forward else (bad[-1], "backward")
        what = f"{tensors[first].num_non_finite} values are not finite"
        count = len({name.removesuffix(".row").removesuffix(".column") for name in bad})
        others = f"; first of {count} such operands of linear layers in the order of the {order} pass"
        yield HealthWarning(first, what + (others if count > 1 else ""))


def find_saturated(records: StatisticsRecords) -> Iterator[HealthWarning]:
    """Values saturate at the largest number that their scale expresses."""
    for name, recent in recent_stats(records):
        if all(is_saturated(stats) for stats in recent):
            yield HealthWarning(name, f"{recent[-1].saturated_fraction:.2%} of its values saturate")


def is_saturated(stats: TensorStats) -> bool:
    """Whether more of a tensor saturates than of a healthy tensor in its format."""
    limit_db, local_db = MAX_DB_OF_SATURATED.get(stats.format), stats.mean_local_sqnr_db
    is_harmless = limit_db is not None and local_db is not None and local_db >= limit_db
    return (stats.saturated_fraction or 0) > MAX_SATURATED[stats.format] and not is_harmless


def find_underflow(records: StatisticsRecords) -> Iterator[HealthWarning]:
    """Gradients underflow to zero."""
    for name, recent in recent_stats(records):
        is_over = [(stats.underflow_fraction or 0) > MAX_UNDERFLOW[stats.format] for stats in recent]
        if ".grad_output" in name and all(is_over):
            yield HealthWarning(name, f"{recent[-1].underflow_fraction:.1%} of its values become zero")


def find_noise(records: StatisticsRecords) -> Iterator[HealthWarning]:
    """The local SQNR of a tensor is low, whatever the SQNR of its largest values is."""
    for name, recent in recent_stats(records):
        levels = [stats.mean_local_sqnr_db for stats in recent if stats.mean_local_sqnr_db is not None]
        if len(levels) == len(recent) and all(level < MIN_LOCAL_DB for level in levels):
            yield HealthWarning(name, f"signal-to-quantization-noise ratio of {levels[-1]:.1f} dB")


def find_moving_scales(records: StatisticsRecords) -> Iterator[HealthWarning]:
    """The amax of an input or weight, and so its scale, jumps between statistics steps. Gradients do so in any run."""
    for name, recent in recent_stats(records, NUM_LASTING + 1):
        if ".grad_output" in name or any(stats.quant_scale_min is None for stats in recent):
            continue
        amaxes = [max(stats.amax, 1e-38) for stats in recent]
        factors = [max(after / before, before / after) for before, after in zip(amaxes, amaxes[1:], strict=False)]
        if all(factor > 2**MOVING_OCTAVES for factor in factors):
            history = " -> ".join(f"{amax:.3g}" for amax in amaxes)
            yield HealthWarning(name, f"its amax changed {history} between statistics steps")


def find_stale_scales(records: StatisticsRecords) -> Iterator[HealthWarning]:
    """The scales of delayed scaling no longer fit the tensor."""
    for name, recent in recent_stats(records):
        octaves = [stats.staleness_octaves for stats in recent if stats.staleness_octaves is not None]
        if len(octaves) < len(recent):
            continue
        if all(each > STALE_OCTAVES for each in octaves):
            yield HealthWarning(name, f"its amax is {2 ** octaves[-1]:.3g} times the amax of its scale")
        elif all(each < LOOSE_OCTAVES for each in octaves):
            yield HealthWarning(
                name,
                f"its scale is for {2 ** -octaves[-1]:.3g} times its amax, so part of the format's range is unused",
            )


def find_stalled_weights(records: StatisticsRecords) -> Iterator[HealthWarning]:
    """Updates are too small to change a weight or its codes."""
    for name, recent in recent_stats(records):
        ratios = [stats.update_to_weight for stats in recent if stats.update_to_weight is not None]
        if len(ratios) < len(recent):
            continue
        changed = [stats.codes_changed_fraction or 0 for stats in recent]
        if all(ratio < MIN_UPDATE_TO_WEIGHT for ratio in ratios):
            yield HealthWarning(name, f"an update changes it by {ratios[-1]:.2g} of its norm")
        elif all(fraction < MIN_CODES_CHANGED for fraction in changed):
            yield HealthWarning(name, f"an update changes only {changed[-1]:.2g} of its codes")


def find_growing_outliers(records: StatisticsRecords) -> Iterator[HealthWarning]:
    """One channel of an input grows away from the others."""
    for name, recent in recent_stats(records, NUM_GROWING):
        if ".input" not in name or len({stats.outlier_channel for stats in recent}) > 1:
            continue
        octaves = [stats.outlier_octaves or 0.0 for stats in recent]
        is_growing = all(after > before for before, after in zip(octaves, octaves[1:], strict=False))
        if is_growing and octaves[-1] >= OUTLIER_OCTAVES and octaves[-1] - octaves[0] >= OUTLIER_GROWTH:
            yield HealthWarning(
                name,
                f"channel {recent[-1].outlier_channel} has {2 ** octaves[-1]:.3g} times the amax of the median "
                f"channel, up from {2 ** octaves[0]:.3g} times {NUM_GROWING - 1} statistics steps ago",
            )


RULES: tuple[Rule, ...] = (
    Rule("non-finite values", find_nonfinite, health_suggestions.for_nonfinite_values),
    Rule("saturation", find_saturated, health_suggestions.for_saturation),
    Rule("gradients underflow", find_underflow, health_suggestions.for_underflow),
    Rule("quantization noise", find_noise, health_suggestions.for_noise),
    Rule("scales still changing after warmup", find_moving_scales, health_suggestions.for_moving_scales, True),
    Rule("stale delayed scales", find_stale_scales, health_suggestions.for_stale_scales),
    Rule("stalled weights", find_stalled_weights, health_suggestions.for_stalled_weights, True),
    Rule("growing outlier channel", find_growing_outliers, health_suggestions.for_outliers),
)


class HealthMonitor:
    """Applies the rules to the newest statistics records. Each warning about a tensor is reported once.

    Args:
        case: the run.
        warmup_steps: of the learning rate; some rules apply only afterwards.
    """

    def __init__(self, case: HealthCase, warmup_steps: float = 0):
        self.case, self.warmup_steps = case, warmup_steps
        self.records: deque[QuantizationRecord] = deque(maxlen=NUM_GROWING)
        self.num_records = 0
        self.first_seen: dict[str, dict[str, int]] = {rule.name: {} for rule in RULES}

    def update(self, record: QuantizationRecord) -> list[EventRecord]:
        """Add a record. Returns one event per rule with new warnings."""
        self.records.append(record)
        self.num_records += 1
        events = []
        for rule in RULES:
            records = [r for r in self.records if not rule.waits_for_warmup or r.step > self.warmup_steps]
            seen = self.first_seen[rule.name]
            new = [warning for warning in (rule.find(records) if records else ()) if warning.tensor not in seen]
            seen.update((warning.tensor, record.step) for warning in new)
            if new:
                suggestions = "; ".join(rule.suggestions(replace(self.case, linear=linear_of(new[0].tensor))))
                detail = f"{rule.name}: {warnings_text(new)}" + (f"; try: {suggestions}" if suggestions else "")
                events.append(EventRecord(step=record.step, name=EVENT, detail=detail))
        return events

    def summary(self, first_step: int, last_step: int) -> EventRecord:
        """All warnings of the run in one line, and how much they are based on.

        Args:
            first_step, last_step: the steps that were made.
        """
        if not self.num_records:
            reason = self.no_statistics_reason(first_step, last_step)
            return EventRecord(step=last_step, name=EVENT, detail=f"no quantization statistics: {reason}")
        parts = [
            f"{rule} ({len(seen)} tensors, first at step {min(seen.values())})"
            for rule, seen in self.first_seen.items()
            if seen
        ]
        steps = f"{self.num_records} statistics step{'s' if self.num_records > 1 else ''}"
        tensors = f"{len(tensors_of(self.records[-1]))} tensors{'' if self.records[-1].tensors else ONLY_WHAT_IF}"
        detail = f"{steps}, {tensors}: {'; '.join(parts) or 'nothing to report'}"
        return EventRecord(step=last_step, name=EVENT, detail=detail)

    def no_statistics_reason(self, first_step: int, last_step: int) -> str:
        """Why there was no statistics step."""
        interval, precision = self.case.fp8_log_interval, self.case.precision
        assert interval is not None
        steps, text = range(first_step, last_step + 1), f"steps {first_step} to {last_step}"
        if not any(step % interval == 0 for step in steps):
            return f"none of the {text} is a multiple of --fp8-log-interval {interval}; use a shorter interval"
        if not any(is_quantized_at(precision, step) for step in steps):
            return f"the {text} are in high precision (--fp8-schedule {precision.fp8_schedule})"
        return (
            f"those of the {text} that are multiples of --fp8-log-interval {interval} are in high precision "
            f"(--fp8-schedule {precision.fp8_schedule}); use a shorter interval"
        )


def warnings_text(warnings: Sequence[HealthWarning]) -> str:
    """The first warnings, and how many more there are."""
    text = "; ".join(f"{warning.tensor}: {warning.what}" for warning in warnings[:MAX_NAMED])
    more = len(warnings) - MAX_NAMED
    return f"{text}; and {more} more" if more > 0 else text
