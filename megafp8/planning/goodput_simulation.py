"""Discrete-event simulation of one run: training, saves, failures, recoveries, planned interruptions, stragglers.

Between two events training is periodic: `save_interval` steps, then the stall of a save. `Training.advance` computes
all complete periods at once, so the time of a simulation depends on the number of events and not on that of steps. A
failure loses everything after the last complete checkpoint. The time of a run is the sum of `PARTS`. What is due while
the run is down, such as maintenance, is done in that time.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Optional

from megafp8.planning.goodput_inputs import GoodputInputs

# ---- Random events of a goodput simulation: failures, planned interruptions and stragglers --------------------------
# Each kind has generators of its own, seeded with the seed and its name. Two simulations that differ in a cost or an
# interval therefore meet the same failures, and their difference has little noise.

Failure = tuple[float, bool, bool]
"""Time in seconds, whether it is a hang, and whether a node has to be replaced."""
NEVER: Failure = (math.inf, False, False)


def failures(inputs: GoodputInputs, seed: str) -> Iterator[Failure]:
    """Failures in the order of their times, without end."""
    if not inputs.failures_per_s:
        while True:
            yield NEVER
    kind = random.Random(f"{seed}/kind")
    for time_s in failure_times(inputs, seed):
        yield time_s, kind.random() < inputs.hang_fraction, kind.random() < inputs.hardware_fraction


def failure_times(inputs: GoodputInputs, seed: str) -> Iterator[float]:
    """Times of failures: a Poisson process of bursts. Further failures of a burst follow with exponential gaps."""
    first, further = random.Random(f"{seed}/bursts"), random.Random(f"{seed}/further")
    bursts_per_s = inputs.failures_per_s / inputs.failures_per_burst
    ends_fraction = 1 / inputs.failures_per_burst
    pending: list[float] = []
    next_burst_s = 0.0
    while True:
        next_burst_s += first.expovariate(bursts_per_s)
        while pending and pending[0] < next_burst_s:
            yield heapq.heappop(pending)
        yield next_burst_s
        time_s = next_burst_s
        while ends_fraction < 1 and further.random() >= ends_fraction:
            time_s += further.expovariate(1 / inputs.burst_gap_s)
            heapq.heappush(pending, time_s)


def planned_interruptions(inputs: GoodputInputs, seed: str) -> Iterator[float]:
    """Times of planned interruptions: at a fixed interval, the first at a random time within it."""
    interval_s = inputs.maintenance_interval_s or math.inf
    time_s = math.inf if math.isinf(interval_s) else interval_s * random.Random(f"{seed}/planned").random()
    while True:
        yield time_s
        time_s += interval_s


def slow_periods(inputs: GoodputInputs, seed: str) -> Iterator[tuple[float, float]]:
    """Time and slowdown from then on, whenever a node becomes slow or fast.

    With several slow nodes a step is as slow as with one.
    """
    rate = inputs.num_nodes * inputs.stragglers_per_s
    if not rate:
        while True:
            yield math.inf, 1.0
    draw, lengths = random.Random(f"{seed}/stragglers"), random.Random(f"{seed}/straggler lengths")
    ends_s: list[float] = []
    start_s = draw.expovariate(rate)
    while True:
        if ends_s and ends_s[0] <= start_s:
            end_s = heapq.heappop(ends_s)
            yield end_s, inputs.straggler_slowdown if ends_s else 1.0
        else:
            heapq.heappush(ends_s, start_s + lengths.expovariate(1 / inputs.straggler_s))
            yield start_s, inputs.straggler_slowdown
            start_s += draw.expovariate(rate)


# ----------------------------------------------------------------------------------------------------------------------

USEFUL, SAVES, LOST, DETECTION, NODES, RESTART, LOADING, MAINTENANCE, STRAGGLERS = PARTS = (
    "useful training", "stalls of saves", "repeated steps", "detection", "waiting for nodes", "restarts", "loading",
    "maintenance", "stragglers",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The result of a simulated run.

    Attributes:
        parts_s: seconds by part; their sum is the duration.
        num_failures: failures that struck, also during recoveries.
    """

    parts_s: dict[str, float]
    num_failures: int
    num_planned: int

    @property
    def effective_fraction(self) -> float:
        """Useful training at full speed over the elapsed time."""
        return self.parts_s[USEFUL] / math.fsum(self.parts_s.values())


class Training:
    """Progress of training and of its checkpoints, in seconds of steps at full speed.

    A save starts when `period_s` of steps are done and the previous save is complete. Training stops for `stall_s`; the
    checkpoint is complete `write_s` after the start.
    """

    def __init__(self, period_s: float, stall_s: float, write_s: float):
        self.period_s, self.stall_s, self.write_s = period_s, stall_s, write_s
        self.complete = 0.0  # progress in the last complete checkpoint
        self.saved = 0.0  # progress in the last checkpoint that was started
        self.since = 0.0  # progress after it
        self.written_at_s = -math.inf  # when the last checkpoint that was started is complete
        self.stall_left_s = 0.0
        self.stalled_s = self.slowed_s = 0.0

    @property
    def progress_s(self) -> float:
        """All progress, saved or not."""
        return self.saved + self.since

    def advance(self, now_s: float, until_s: float, slowdown: float) -> None:
        """Train from `now_s` to `until_s`; each step takes `slowdown` times its normal duration."""
        while True:
            if self.stall_left_s:
                stall_s = min(self.stall_left_s, until_s - now_s)
                self.stalled_s += stall_s
                self.stall_left_s -= stall_s
                now_s += stall_s
            steps_s = self.period_s - self.since
            if now_s + steps_s * slowdown > until_s:
                done_s = (until_s - now_s) / slowdown
                self.since += done_s
                self.slowed_s += done_s * (slowdown - 1)
                return
            self.since = self.period_s
            self.slowed_s += steps_s * (slowdown - 1)
            now_s += steps_s * slowdown
            if self.written_at_s > now_s:  # the previous save is still in progress
                wait_end_s = min(self.written_at_s, until_s)
                self.stalled_s += wait_end_s - now_s
                now_s = wait_end_s
                if now_s < self.written_at_s:
                    return
            self._start_save(now_s)
            # Skip complete periods, up to the start of the last save before `until_s`.
            cycle_s = max(self.stall_s + self.period_s * slowdown, self.write_s)
            num_cycles = int((until_s - now_s) // cycle_s)
            if num_cycles > 0:
                now_s += num_cycles * cycle_s
                self.stalled_s += num_cycles * (cycle_s - self.period_s * slowdown)
                self.slowed_s += num_cycles * self.period_s * (slowdown - 1)
                self.saved += num_cycles * self.period_s
                self.complete = self.saved - self.period_s
                self.written_at_s = now_s + self.write_s

    def _start_save(self, now_s: float) -> None:
        self.complete = self.saved
        self.saved += self.since
        self.since = 0.0
        self.written_at_s = now_s + self.write_s
        self.stall_left_s = self.stall_s

    def save_now(self) -> None:
        """A complete checkpoint of all progress; the caller accounts for its time."""
        self.complete = self.saved = self.progress_s
        self.since = self.stall_left_s = 0.0
        self.written_at_s = -math.inf

    def fail(self, now_s: float) -> float:
        """Return to the last complete checkpoint; the seconds of steps that are lost."""
        if self.written_at_s <= now_s:
            self.complete = self.saved
        lost_s = self.progress_s - self.complete
        self.saved = self.complete
        self.since = self.stall_left_s = 0.0
        self.written_at_s = -math.inf
        return lost_s


@dataclass
class Simulation:
    """The state of one simulated run."""

    inputs: GoodputInputs
    failures: Iterator[Failure]
    end_s: float
    failure: Failure = NEVER
    node_ready_s: float = 0.0
    """When the last node that was replaced has a substitute."""
    maintenance_end_s: float = 0.0
    spares_at_s: list[float] = field(default_factory=list)
    """Heap of times from which each spare node is available."""
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    num_failures: int = 0

    def next_failure(self, delay_s: float = 0.0) -> None:
        """Advance to the next failure."""
        time_s, is_hang, is_hardware = next(self.failures)
        self.failure = (time_s + delay_s, is_hang, is_hardware)

    def recovery(self, now_s: float) -> list[tuple[str, float]]:
        """Parts of the recovery from a failure that strikes now."""
        inputs, (_, is_hang, is_hardware) = self.inputs, self.failure
        self.num_failures += 1
        if is_hardware and inputs.spare_nodes is not None:
            self.node_ready_s = heapq.heappushpop(self.spares_at_s, now_s + inputs.repair_s)
        detection_s = inputs.hang_detection_s if is_hang else inputs.detection_s
        return [(DETECTION, detection_s), *self.start_parts(now_s + detection_s)]

    def start_parts(self, now_s: float) -> list[tuple[str, float]]:
        """Parts of a start: waiting for the end of maintenance and for nodes, restart, load."""
        maintenance_s = max(0.0, self.maintenance_end_s - now_s)
        nodes_s = max(0.0, self.node_ready_s - now_s - maintenance_s)
        return [
            (MAINTENANCE, maintenance_s), (NODES, nodes_s), (RESTART, self.inputs.restart_s),
            (LOADING, self.inputs.load_s),
        ]  # fmt: skip

    def spend(self, now_s: float, parts: list[tuple[str, float]]) -> float:
        """Spend the parts of an interruption. A failure in one replaces the rest. Returns the time at the end."""
        while parts:
            (part, seconds), *parts = parts
            stop_s = min(now_s + seconds, self.end_s)
            failure_s = self.failure[0]
            if self.inputs.fails_while_down and failure_s < stop_s:
                self.parts_s[part] += failure_s - now_s
                now_s = failure_s
                parts = self.recovery(now_s)
                self.next_failure()
            else:
                self.parts_s[part] += stop_s - now_s
                now_s = stop_s
        return now_s


def simulate(inputs: GoodputInputs, save_interval: Optional[int], duration_s: float, seed: str) -> Outcome:
    """Simulate one run.

    Args:
        save_interval: steps between saves; None: the run never saves.
        seed: determines all random
    """
    period_s = math.inf if save_interval is None else save_interval * inputs.step_s
    training = Training(period_s, inputs.stall_s, inputs.write_s)
    state = Simulation(inputs=inputs, failures=failures(inputs, seed), end_s=duration_s)
    state.spares_at_s = [0.0] * (inputs.spare_nodes or 0)
    planned, slow = planned_interruptions(inputs, seed), slow_periods(inputs, seed)
    state.next_failure()
    planned_s, (slow_s, next_slowdown) = next(planned), next(slow)
    now_s = down_s = 0.0
    slowdown, num_planned = 1.0, 0
    while now_s < duration_s:
        until_s = min(state.failure[0], planned_s, max(slow_s, now_s), duration_s)
        training.advance(now_s, until_s, slowdown)
        now_s = until_s
        if now_s >= duration_s:
            break
        if slow_s <= now_s:
            slowdown = next_slowdown
            slow_s, next_slowdown = next(slow)
            continue
        before_s = now_s
        if state.failure[0] <= now_s:
            state.parts_s[LOST] += training.fail(now_s)
            parts = state.recovery(now_s)
            state.next_failure(down_s)
        else:
            training.save_now()
            num_planned += 1
            planned_s = next(planned)
            state.maintenance_end_s = now_s + inputs.write_s + inputs.maintenance_s
            parts = [
                (SAVES, inputs.write_s), (MAINTENANCE, inputs.maintenance_s),
                *state.start_parts(state.maintenance_end_s),
            ]  # fmt: skip
        now_s = state.spend(now_s, parts)
        while planned_s < now_s:  # done while the run is down
            planned_s = next(planned)
        if not inputs.fails_while_down:  # the clock of failures stands still while the run is down
            down_s += now_s - before_s
            state.failure = (state.failure[0] + now_s - before_s, *state.failure[1:])
    state.parts_s[USEFUL] = training.progress_s
    state.parts_s[SAVES] += training.stalled_s
    state.parts_s[STRAGGLERS] += training.slowed_s
    return Outcome(state.parts_s, state.num_failures, num_planned)
