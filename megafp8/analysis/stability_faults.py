"""What planted faults cost: steps until a run notices one, until the loss suffers and recovers, and the loss lost.

A run with a fault is compared with the clean run of the same recipe and seed, which reads the same batches. Losses are
means of `WINDOW` steps; those that are not finite are worse than any other, and so are those that a run that stopped
never had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from megafp8.metrics.records import EventRecord

CLEAN, REPAIR = "clean", "_with_"
EVENTS = ("guard", "layer moved", "layer smoothed", "non-finite operands", "amax history cleared", "step skipped",
          "bad numbers")  # fmt: skip
WINDOW, LAST = 10, 20
WORSE, RECOVERED = 0.05, 0.01
LEAD = 50
"""Steps before the loss is WORSE in which a gradual fault should be noticed."""
SUDDEN = ("spike-batch", "infinite-activation")
NO_ALARM, ALARM = "no alarm", "false alarm"
IN_TIME, LATE, MISSED = "in time", "late", "missed"
REPAIRED, NOT_REPAIRED = "repaired", "not repaired"


@dataclass(frozen=True, kw_only=True)
class FaultCost:
    """What a fault did to one run. Steps are counted from the fault; None where it never came to that.

    Attributes:
        noticed: until the first event.
        worse: until the loss is WORSE than the clean run's.
        recovered: until the loss stays within RECOVERED of the clean run's; 0 if it always did.
        lost_fraction: mean loss of the LAST steps against the clean run's; infinite if the run stopped.
        event: the first event.
    """

    noticed: Optional[int]
    worse: Optional[int]
    recovered: Optional[int]
    lost_fraction: float
    event: str


def fault_cost(
    losses: Sequence[float], clean: Sequence[float], events: Sequence[EventRecord], fault_step: int
) -> FaultCost:
    """Compare a run with the clean one.

    Args:
        losses, clean: of all steps of both runs.
        fault_step: the first step with the fault.
    """
    losses = [*losses, *[math.inf] * (len(clean) - len(losses))]
    own = [event for event in events if event.name in EVENTS and event.step >= fault_step]
    gaps = smoothed_gaps(losses, clean)[fault_step - 1 :]
    worse = next((index for index, gap in enumerate(gaps) if not gap <= WORSE), None)
    outside = [index for index, gap in enumerate(gaps) if not gap <= RECOVERED]
    recovered = outside[-1] + 1 if outside else 0
    return FaultCost(
        noticed=own[0].step - fault_step if own else None,
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


def verdict_of(fault: str, repair: str, costs: Sequence[FaultCost]) -> str:
    """Whether a fault was noticed in time, in a run without repair, or repaired."""
    if repair:
        mean_lost = sum(cost.lost_fraction for cost in costs) / len(costs)
        return REPAIRED if mean_lost <= RECOVERED else NOT_REPAIRED
    if any(cost.noticed is None for cost in costs):
        return MISSED
    if fault in SUDDEN:
        return IN_TIME if all(cost.noticed == 0 for cost in costs) else LATE
    leads = [cost.worse - cost.noticed for cost in costs if cost.worse is not None and cost.noticed is not None]
    return IN_TIME if all(lead >= LEAD for lead in leads) else LATE


@dataclass(frozen=True, kw_only=True)
class FaultRow:
    """A fault and its repair in one recipe, over the seeds.

    Attributes:
        fault: CLEAN for the runs without one; then `num_alarms` counts those with an event.
    """

    recipe: str
    fault: str
    repair: str
    verdict: str
    costs: tuple[FaultCost, ...] = ()
    num_runs: int = 0
    num_alarms: int = 0


def fault_rows(
    losses: Mapping[tuple[str, str, str], Sequence[float]],
    events: Mapping[tuple[str, str, str], Sequence[EventRecord]],
    fault_step: int,
) -> list[FaultRow]:
    """A row for each recipe and arm, over the seeds that have a clean run of their recipe.

    Args:
        losses, events: by recipe, arm and seed. An arm is CLEAN, a fault, or a fault, REPAIR and a repair.
    """
    rows = []
    for recipe, arm in dict.fromkeys((recipe, arm) for recipe, arm, _ in losses):
        seeds = [seed for known, own, seed in losses if (known, own) == (recipe, arm)]
        if arm == CLEAN:
            alarms = [seed for seed in seeds if any(e.name in EVENTS for e in events[recipe, arm, seed])]
            verdict = ALARM if alarms else NO_ALARM
            rows.append(FaultRow(recipe=recipe, fault=arm, repair="", verdict=verdict, num_runs=len(seeds),
                                 num_alarms=len(alarms)))  # fmt: skip
            continue
        fault, _, repair = arm.partition(REPAIR)
        costs = tuple(
            fault_cost(losses[recipe, arm, seed], clean, events[recipe, arm, seed], fault_step)
            for seed in seeds if (clean := losses.get((recipe, CLEAN, seed))) is not None
        )  # fmt: skip
        if costs:
            rows.append(FaultRow(recipe=recipe, fault=fault, repair=repair, verdict=verdict_of(fault, repair, costs),
                                 costs=costs, num_runs=len(costs)))  # fmt: skip
    return rows


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
    "5% worse after",
    "recovered after",
    "loss lost",
    "runs",
)


def row_cells(row: FaultRow) -> tuple[str, ...]:
    """Cells under HEADER."""
    if row.fault == CLEAN:
        return (
            row.fault,
            row.verdict,
            row.recipe,
            "-",
            f"{row.num_alarms} with events",
            "-",
            "-",
            "-",
            str(row.num_runs),
        )
    costs = row.costs
    lost = range_text([100 * cost.lost_fraction for cost in costs], "{:+.2f}%").replace("+inf%", "stopped")
    return (
        row.fault, row.verdict, row.recipe, row.repair or "-", range_text([cost.noticed for cost in costs]),
        range_text([cost.worse for cost in costs]), range_text([cost.recovered for cost in costs]),
        lost, str(row.num_runs),
    )  # fmt: skip
