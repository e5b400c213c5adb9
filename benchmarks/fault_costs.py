"""What planted faults cost: steps until a run notices one, until the loss suffers and recovers, and the loss lost.

A run with a fault is compared with the clean run of the same recipe and seed, which reads the same batches. Losses are
means of `WINDOW` steps; those that are not finite are worse than any other, and so are those that a run that stopped
never had. The step of a sudden fault is left out of them: its loss is that of a bad batch or operand, and not harm to
the model.

Runs with a repair have two verdicts, decided for each seed. One is on the detection, as in runs without a repair. The
other is on the repair: a seed counts as repaired if the fault did harm in the run without a repair, the event of the
repair is in the records, and the loss at the end is within RECOVERED. A row is not repaired if one seed is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from benchmarks.layer_faults import SPIKE_BATCH, SUDDEN_FAULTS
from megafp8.analysis.percent import signed_interval
from megafp8.analysis.seed_statistics import UNDECIDED, Interval, mean_interval
from megafp8.metrics.records import EventRecord

CLEAN, REPAIR = "clean", "_with_"
REPAIR_EVENTS = {
    "bf16-layer": "layer moved", "smooth-swiglu": "layer smoothed", "bf16": "linear moved", "skip": "step skipped",
}  # fmt: skip
"""Repair to the event that records it."""
EVENTS = ("guard", "non-finite operands", "amax history cleared", "bad numbers", *REPAIR_EVENTS.values())
WINDOW, LAST = 10, 20
WORSE_FRACTION, RECOVERED = 0.05, 0.01
LEAD = 50
"""Steps before the loss is worse by WORSE_FRACTION in which a gradual fault should be noticed."""
UNWATCHED = (SPIKE_BATCH,)
"""Faults that nothing looks for in the runs without a repair, which show what the fault costs."""
NO_ALARM, ALARM = "no alarm", "false alarm"
IN_TIME, LATE, MISSED, NOT_WATCHED = "in time", "late", "missed", "not watched"
REPAIRED, NOT_REPAIRED, NO_HARM = "repaired", "not repaired", "no harm"


@dataclass(frozen=True, kw_only=True)
class FaultCost:
    """What a fault did to one run. Steps are counted from the fault; None where it never came to that.

    Attributes:
        noticed: until the first event.
        repaired: until the event of the repair.
        worse: until the loss is worse than the clean run's by WORSE_FRACTION.
        recovered: until the loss stays within RECOVERED of the clean run's; 0 if it always did.
        lost_fraction: mean loss of the LAST steps against the clean run's; infinite if the run stopped.
        event: the first event.
    """

    noticed: Optional[int]
    repaired: Optional[int]
    worse: Optional[int]
    recovered: Optional[int]
    lost_fraction: float
    event: str

    @property
    def is_harmed(self) -> bool:
        """Whether the loss was ever worse by WORSE_FRACTION, or ended outside RECOVERED."""
        return self.worse is not None or not self.lost_fraction <= RECOVERED


def fault_cost(
    losses: Sequence[float],
    clean: Sequence[float],
    events: Sequence[EventRecord],
    fault_step: int,
    fault: str,
    repair: str = "",
) -> FaultCost:
    """Compare a run with the clean one.

    Args:
        losses, clean: of all steps of both runs.
        fault_step: the first step with the fault.
        repair: of the run; empty without one.
    """
    losses = [*losses, *[math.inf] * (len(clean) - len(losses))]
    if fault in SUDDEN_FAULTS and fault_step <= len(clean):
        losses[fault_step - 1] = clean[fault_step - 1]
    own = [event for event in events if event.name in EVENTS and event.step >= fault_step]
    repairs = [event.step - fault_step for event in own if event.name == REPAIR_EVENTS.get(repair)]
    gaps = smoothed_gaps(losses, clean)[fault_step - 1 :]
    worse = next((index for index, gap in enumerate(gaps) if not gap <= WORSE_FRACTION), None)
    outside = [index for index, gap in enumerate(gaps) if not gap <= RECOVERED]
    recovered = outside[-1] + 1 if outside else 0
    return FaultCost(
        noticed=own[0].step - fault_step if own else None,
        repaired=repairs[0] if repairs else None,
        worse=worse,
        recovered=None if recovered >= len(gaps) else recovered,
        lost_fraction=sum(losses[-LAST:]) / sum(clean[-LAST:]) - 1,
        event=f"{own[0].name}: {own[0].detail.splitlines()[0]}" if own else "",
    )


def smoothed_gaps(losses: Sequence[float], clean: Sequence[float]) -> list[float]:
    """Relative gap of the mean of the last WINDOW losses at every step that both runs have."""
    num_steps = min(len(losses), len(clean))
    spans = [slice(max(0, end - WINDOW), end) for end in range(1, num_steps + 1)]
    return [sum(losses[span]) / sum(clean[span]) - 1 for span in spans]


def detection_verdict(fault: str, repair: str, costs: Sequence[FaultCost]) -> str:
    """Whether all seeds noticed a fault in time: a sudden one in its own step, a gradual one LEAD steps early."""
    if fault in UNWATCHED and not repair:
        return NOT_WATCHED
    if any(cost.noticed is None for cost in costs):
        return MISSED
    if fault in SUDDEN_FAULTS:
        return IN_TIME if all(cost.noticed == 0 for cost in costs) else LATE
    leads = [cost.worse - cost.noticed for cost in costs if cost.worse is not None and cost.noticed is not None]
    return IN_TIME if all(lead >= LEAD for lead in leads) else LATE


def repair_verdict(costs: Mapping[str, FaultCost], unrepaired: Mapping[str, FaultCost]) -> str:
    """Whether a repair brought the loss back in every seed in which the fault did harm.

    A seed is `not repaired` if its loss ends outside RECOVERED, or if the fault did harm and the event of the repair is
    missing. A row is `no harm` if the fault did none in any seed, and undecided without a run to tell.

    Args:
        costs: of the runs with the repair, by seed.
        unrepaired: of the runs with the same fault and without a repair, by seed.
    """
    found = {seed_verdict(cost, unrepaired.get(seed)) for seed, cost in costs.items()}
    return next(verdict for verdict in (NOT_REPAIRED, REPAIRED, NO_HARM, UNDECIDED) if verdict in found)


def seed_verdict(cost: FaultCost, unrepaired: Optional[FaultCost]) -> str:
    """Whether a run was repaired; undecided without its counterpart."""
    if not cost.lost_fraction <= RECOVERED:
        return NOT_REPAIRED
    if unrepaired is None:
        return UNDECIDED
    if not unrepaired.is_harmed:
        return NO_HARM
    return NOT_REPAIRED if cost.repaired is None else REPAIRED


@dataclass(frozen=True, kw_only=True)
class FaultRow:
    """A fault and its repair in one recipe, over the seeds.

    Attributes:
        fault: CLEAN for the runs without one; then `num_alarms` counts those with an event.
        verdict: on the detection; with a repair also on the repair, after a comma.
        lost: mean of the fractions lost, with its interval; None with a single run or one that stopped.
    """

    recipe: str
    fault: str
    repair: str
    verdict: str
    costs: tuple[FaultCost, ...] = ()
    lost: Optional[Interval] = None
    num_runs: int = 0
    num_alarms: int = 0


Arm = tuple[str, str, str]
"""Recipe, arm and seed. An arm is CLEAN, a fault, or a fault, REPAIR and a repair."""


def fault_rows(
    losses: Mapping[Arm, Sequence[float]], events: Mapping[Arm, Sequence[EventRecord]], fault_step: int
) -> list[FaultRow]:
    """A row for each recipe and arm, over the seeds that have a clean run of their recipe."""
    costs: dict[tuple[str, str], dict[str, FaultCost]] = {}
    for (recipe, arm, seed), own in losses.items():
        clean = losses.get((recipe, CLEAN, seed))
        fault, _, repair = arm.partition(REPAIR)
        found = costs.setdefault((recipe, arm), {})
        if arm != CLEAN and clean is not None:
            found[seed] = fault_cost(own, clean, events[recipe, arm, seed], fault_step, fault, repair)
    rows = []
    for (recipe, arm), by_seed in costs.items():
        if arm == CLEAN:
            seeds = [seed for known, own, seed in losses if (known, own) == (recipe, CLEAN)]
            num_alarms = sum(any(e.name in EVENTS for e in events[recipe, CLEAN, seed]) for seed in seeds)
            rows.append(FaultRow(recipe=recipe, fault=arm, repair="", verdict=ALARM if num_alarms else NO_ALARM,
                                 num_runs=len(seeds), num_alarms=num_alarms))  # fmt: skip
        elif by_seed:
            rows.append(fault_row(recipe, arm, by_seed, costs.get((recipe, arm.partition(REPAIR)[0]), {})))
    return rows


def fault_row(recipe: str, arm: str, by_seed: Mapping[str, FaultCost], unrepaired: Mapping[str, FaultCost]) -> FaultRow:
    """The row of an arm with a fault."""
    fault, _, repair = arm.partition(REPAIR)
    costs = tuple(by_seed.values())
    fractions = [cost.lost_fraction for cost in costs]
    verdicts = [detection_verdict(fault, repair, costs), *([repair_verdict(by_seed, unrepaired)] if repair else [])]
    return FaultRow(
        recipe=recipe, fault=fault, repair=repair, verdict=", ".join(verdicts), costs=costs, num_runs=len(costs),
        lost=mean_interval(fractions) if len(fractions) > 1 and all(map(math.isfinite, fractions)) else None,
    )  # fmt: skip


def range_text(values: Sequence[Optional[float]], form: str = "{:.0f}", missing: str = "never") -> str:
    """The range of some numbers; `missing` stands for None."""
    known = sorted(value for value in values if value is not None)
    texts = list(dict.fromkeys(form.format(value) for value in (known[0], known[-1]))) if known else []
    return ", ".join([" to ".join(texts)] * bool(texts) + [missing] * (None in values))


HEADER = (
    "fault",
    "verdict",
    "recipe",
    "repair",
    "noticed after",
    "repair after",
    f"{WORSE_FRACTION:.0%} worse after",
    "recovered after",
    "loss lost",
    "95% interval",
    "runs",
)


def row_cells(row: FaultRow) -> tuple[str, ...]:
    """Cells under HEADER."""
    costs = row.costs
    if row.fault == CLEAN:
        return (row.fault, row.verdict, row.recipe, "-", f"{row.num_alarms} with events", *"-----", str(row.num_runs))
    fractions = range_text([100 * cost.lost_fraction for cost in costs], "{:+.2f}%").replace("+inf%", "stopped")
    noticed = "-" if row.verdict == NOT_WATCHED else range_text([cost.noticed for cost in costs])
    return (
        row.fault, row.verdict, row.recipe, row.repair or "-", noticed,
        range_text([cost.repaired for cost in costs]) if row.repair else "-",
        range_text([cost.worse for cost in costs]), range_text([cost.recovered for cost in costs]), fractions,
        signed_interval(row.lost), str(row.num_runs),
    )  # fmt: skip
