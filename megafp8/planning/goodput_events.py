"""Random events of a goodput simulation: failures, planned interruptions and stragglers.

Each kind has generators of its own, seeded with the seed and its name. Two simulations that differ in a cost or an
interval therefore meet the same failures, and their difference has little noise.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator

from megafp8.planning.goodput_inputs import GoodputInputs

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
