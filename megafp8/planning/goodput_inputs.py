"""The inputs of a goodput simulation, with their defaults, sources and permitted ranges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

DAY_S = 86_400.0
GB = 1e9

# Llama 3 405B, 54 days on 16,384 H100 in 2,048 nodes (The Llama 3 Herd of Models, 2024, section 3.3.4 and table 5).
# 268 of the 419 unexpected interruptions were due to a GPU: faulty GPU 148, HBM3 72, SRAM 19, system processor 17,
# silent data corruption 6, thermal interface and sensors 6. The other 151 belong to a node, the network or software.
LLAMA_GPU_FAILURES_PER_1000_DAYS = 268 / (16_384 * 54) * 1000
LLAMA_NODE_FAILURES_PER_1000_DAYS = 151 / (2_048 * 54) * 1000
LLAMA_HANG_FRACTION = 7 / 419
"""Share of interruptions that the NCCL watchdog ended."""
LLAMA_HARDWARE_FRACTION = 0.78
"""Share of interruptions with a confirmed or suspected fault of the hardware."""
LLAMA_STORAGE_BYTES_PER_S = 2_000 * GB
"""Sustained throughput of that cluster's storage (section 3.3.1)."""

# benchmarks/RESULTS.md, "A run under faults": median time from the fault to the end of the first new step, two ranks
# under torchrun on two CPU cores at a load of 3 to 15, 8 faults. It includes detection.
SOAK_RESTART_S = 17.0
# benchmarks/RESULTS.md, "Checkpoints": one rank to a local disk, and the stall of --async-save as a share of a save.
NODE_STORAGE_BYTES_PER_S = 1.3 * GB
ASYNC_STALL_FRACTION = 0.142
# The default of --step-timeout-s: 5 times the slowest of the last 50 steps, at least 120 s.
HANG_TIMEOUT_STEPS, MIN_HANG_TIMEOUT_S = 5, 120.0

MOST_EVENTS = 20_000_000
"""Limit on the expected number of simulated events. One takes about 10 microseconds."""


@dataclass(frozen=True, kw_only=True)
class GoodputInputs:
    """A run, its cluster and what goes wrong there. Times are in seconds, rates in events per second.

    Attributes:
        num_nodes: nodes that the run uses.
        days: duration of the run.
        step_s: duration of a step without faults.
        save_interval: steps between checkpoints; None: the best interval is used.
        stall_s: time that training stops for a save. A synchronous save stops it until all is written.
        write_s: time from the start of a save until its checkpoint is complete.
        load_s: time to read a checkpoint after a restart.
        gpu_failures_per_s, node_failures_per_s: rate of failures of one GPU, and of one node apart from its GPUs. Any
            failure stops the run, because training is synchronous.
        failures_per_burst: mean number of failures in a burst. 1: failures are independent, with exponential gaps.
            Above 1 bursts are independent, and their sizes are geometric. The rate of failures does not change.
        burst_gap_s: mean time between the failures of a burst, exponential.
        hang_fraction: share of failures that only a timeout detects.
        hardware_fraction: share of failures after which a node is replaced.
        detection_s, hang_detection_s: time from a failure to the end of all ranks, for crashes and for hangs.
        restart_s: time from then to the first step, without the load.
        fails_while_down: whether failures also strike while the run is down. One during a recovery restarts it.
        spare_nodes: nodes that can replace others; None: one is always available.
        repair_s: time until a replaced node is a spare.
        maintenance_interval_s: time between planned interruptions; None: there are none. The run saves before one.
        maintenance_s: duration of one, without the restart.
        stragglers_per_s: rate at which a node becomes slow.
        straggler_slowdown: duration of a step with a slow node, relative to one without.
        straggler_s: mean time until a slow node is fast again, exponential. Restarts do not change it.
    """

    num_gpus: int
    num_nodes: int
    days: float = 60.0
    step_s: float
    tokens_per_step: float
    save_interval: Optional[int] = None
    stall_s: float
    write_s: float
    load_s: float
    gpu_failures_per_s: float = LLAMA_GPU_FAILURES_PER_1000_DAYS / 1000 / DAY_S
    node_failures_per_s: float = LLAMA_NODE_FAILURES_PER_1000_DAYS / 1000 / DAY_S
    failures_per_burst: float = 1.0
    burst_gap_s: float = 600.0
    hang_fraction: float = LLAMA_HANG_FRACTION
    hardware_fraction: float = LLAMA_HARDWARE_FRACTION
    detection_s: float = 0.0
    hang_detection_s: float = MIN_HANG_TIMEOUT_S
    restart_s: float = SOAK_RESTART_S
    fails_while_down: bool = True
    spare_nodes: Optional[int] = None
    repair_s: float = DAY_S
    maintenance_interval_s: Optional[float] = None
    maintenance_s: float = 0.0
    stragglers_per_s: float = 0.0
    straggler_slowdown: float = 1.2
    straggler_s: float = 3600.0
    replicas: int = 99
    seed: int = 1

    @property
    def duration_s(self) -> float:
        """Duration of the run in seconds."""
        return self.days * DAY_S

    @property
    def failures_per_s(self) -> float:
        """Rate of failures of all GPUs and nodes together."""
        return self.num_gpus * self.gpu_failures_per_s + self.num_nodes * self.node_failures_per_s

    @property
    def mean_time_between_failures_s(self) -> float:
        """Infinite without failures."""
        return 1 / self.failures_per_s if self.failures_per_s else math.inf

    @property
    def events_per_s(self) -> float:
        """Rate of all simulated events: failures, planned interruptions, starts and ends of stragglers."""
        maintenance = 1 / self.maintenance_interval_s if self.maintenance_interval_s else 0.0
        return self.failures_per_s + maintenance + 2 * self.num_nodes * self.stragglers_per_s

    @property
    def is_async(self) -> bool:
        """Whether training continues while a checkpoint is written."""
        return self.stall_s < self.write_s


RANGES: dict[str, tuple[str, float, float]] = {
    "days": ("--days", 0.01, 3650),
    "step_s": ("--step-s", 1e-4, 1e5),
    "tokens_per_step": ("--tokens-per-step", 1, 1e12),
    "save_interval": ("--save-interval", 1, 10**9),
    "gpu_failures_per_s": ("--gpu-failures-per-1000-days", 0, 1e9 / 1000 / DAY_S),
    "node_failures_per_s": ("--node-failures-per-1000-days", 0, 1e9 / 1000 / DAY_S),
    "failures_per_burst": ("--failures-per-burst", 1, 1000),
    "burst_gap_s": ("--burst-gap-s", 0.001, 1e7),
    "hang_fraction": ("--hang-fraction", 0, 1),
    "hardware_fraction": ("--hardware-fraction", 0, 1),
    "detection_s": ("--detection-s", 0, 1e6),
    "hang_detection_s": ("--hang-detection-s", 0, 1e6),
    "restart_s": ("--restart-s", 0, 1e6),
    "spare_nodes": ("--spare-nodes", 0, 2**20),
    "repair_s": ("--repair-hours", 0, 3600 * 1e5),
    "maintenance_interval_s": ("--maintenance-interval-days", 0.001 * DAY_S, 1e5 * DAY_S),
    "maintenance_s": ("--maintenance-minutes", 0, 60 * 1e6),
    "stragglers_per_s": ("--stragglers-per-1000-node-days", 0, 1e6 / 1000 / DAY_S),
    "straggler_slowdown": ("--straggler-slowdown", 1, 1000),
    "straggler_s": ("--straggler-hours", 3600 * 1e-4, 3600 * 1e5),
    "replicas": ("--replicas", 19, 100_000),
    "seed": ("--simulation-seed", 0, 2**63),
}
"""Flag, smallest and largest value of each input that a user gives, in the unit of the input."""
MOST_SAVE_S = 1_000_000
UNITS_S = {
    "--gpu-failures-per-1000-days": 1000 * DAY_S,
    "--node-failures-per-1000-days": 1000 * DAY_S,
    "--repair-hours": 1 / 3600,
    "--maintenance-interval-days": 1 / DAY_S,
    "--maintenance-minutes": 1 / 60,
    "--stragglers-per-1000-node-days": 1000 * DAY_S,
    "--straggler-hours": 1 / 3600,
}
"""What an input is multiplied by for its flag, where the units differ."""


def input_problems(inputs: GoodputInputs) -> Iterator[str]:
    """Inputs out of range, and those that cannot be simulated in reasonable time."""
    problems = list(range_problems(inputs))
    yield from problems
    if problems:
        return
    if (interval_s := inputs.maintenance_interval_s) is not None and inputs.maintenance_s >= interval_s:
        yield (
            f"--maintenance-minutes {inputs.maintenance_s / 60:g}: must be less than --maintenance-interval-days "
            f"{interval_s / DAY_S:g}, or the run never trains"
        )
    if inputs.step_s > inputs.duration_s:
        yield (
            f"--step-s {inputs.step_s:g}: longer than the complete run, {inputs.duration_s:g} s: give at least --days "
            f"{inputs.step_s / DAY_S:.3g}"
        )
    if max(inputs.write_s, inputs.load_s) > MOST_SAVE_S:
        yield (
            f"a checkpoint takes {max(inputs.write_s, inputs.load_s):.3g} s, and at most {MOST_SAVE_S:,} s are "
            "simulated: give more --storage-gb-per-s or --node-storage-gb-per-s, or less --checkpoint-gb"
        )
    if inputs.spare_nodes is not None and inputs.spare_nodes > inputs.num_nodes:
        yield (
            f"--spare-nodes {inputs.spare_nodes:,}: more than the {inputs.num_nodes:,} nodes of the run: give "
            "fewer, or leave it out for a spare node that is always available"
        )
    num_events = inputs.events_per_s * inputs.duration_s * inputs.replicas
    if num_events > MOST_EVENTS:
        yield (
            f"--replicas {inputs.replicas}: {num_events:,.0f} events are expected in all, at most {MOST_EVENTS:,} are "
            "simulated: use fewer --replicas, fewer --days, or lower rates"
        )


def range_problems(inputs: GoodputInputs) -> Iterator[str]:
    """Inputs out of range; NaN is out of every range."""
    for name in RANGES:
        value = getattr(inputs, name)
        if value is not None:
            yield from range_problem(name, value)


def between(low: float, high: float) -> str:
    """A range in words, large numbers with all their digits."""
    return " and ".join((f"between {low:,g}", f"{round(high):,}" if high >= 1 else f"{high:g}"))


def range_problem(name: str, value: float) -> Iterator[str]:
    """A problem if the value of an input is out of its range."""
    flag, low, high = RANGES[name]
    if not low <= value <= high:
        factor = UNITS_S.get(flag, 1)
        yield f"{flag} {value * factor:g}: must be {between(low * factor, high * factor)}"
