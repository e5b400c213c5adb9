"""Goodput of a long run by formulas: effective training time, its parts, and the best save interval.

Failures are independent, with exponential gaps, and also strike while the run is down (Young, CACM 17(9), 1974; Daly,
FGCS 22(3), 2006). docs/dev/planner_model.md has the assumptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

DAY_S = 86_400.0
GB = 1e9

# Llama 3 405B, 54 days on 16,384 H100 in 2,048 nodes (The Llama 3 Herd of Models, 2024, section 3.3.4 and table 5).
# 268 of the 419 unexpected interruptions were due to a GPU: faulty GPU 148, HBM3 72, SRAM 19, system processor 17,
# silent data corruption 6, thermal interface and sensors 6. The other 151 belong to a node, the network or software.
LLAMA_GPU_FAILURES_PER_1000_DAYS = 268 / (16_384 * 54) * 1000
LLAMA_NODE_FAILURES_PER_1000_DAYS = 151 / (2_048 * 54) * 1000
LLAMA_STORAGE_BYTES_PER_S = 2_000 * GB
"""Sustained throughput of that cluster's storage (section 3.3.1)."""

# benchmarks/results/recovery.md: median time from the fault to the end of the first new step, two ranks under torchrun
# on two CPU cores at a load of 3 to 15, 8 faults. It includes detection.
SOAK_RESTART_S = 17.0
# benchmarks/results/checkpoints_io.md: one rank to a local disk, and the stall of --async-save as a share of a save.
NODE_STORAGE_BYTES_PER_S = 1.3 * GB
ASYNC_STALL_FRACTION = 0.142

RANGES: dict[str, tuple[float, float]] = {
    "--days": (0.01, 3650), "--step-s": (1e-4, 1e5), "--tokens-per-step": (1, 1e12),
    "--gpu-failures-per-1000-days": (0, 1e9), "--node-failures-per-1000-days": (0, 1e9),
    "--detection-s": (0, 1e6), "--restart-s": (0, 1e6), "--checkpoint-gb": (1e-6, 1e9),
    "--node-storage-gb-per-s": (1e-3, 1e6), "--storage-gb-per-s": (1e-3, 1e9), "--save-stall-s": (0, 1e6),
}  # fmt: skip
"""Permitted values of the flags that give the inputs, in the units of their names."""

USEFUL, SAVES, LOST, RESTARTS = "useful training", "stalls of saves", "lost work", "restarts"


@dataclass(frozen=True, kw_only=True)
class GoodputInputs:
    """A run, its cluster and its failures. Times are in seconds, rates in failures per second.

    Attributes:
        step_s: duration of a step.
        save_interval: steps between checkpoints; None: the best interval is used.
        stall_s: time that training stops for a save. A synchronous save stops it until all is written.
        write_s: time from the start of a save until its checkpoint is complete.
        load_s: time to read a checkpoint after a restart.
        gpu_failures_per_s, node_failures_per_s: rate of failures of one GPU, and of one node apart from its GPUs. Any
            failure stops the run, because training is synchronous.
        detection_s: mean time from a failure to the end of all ranks.
        restart_s: mean time from then to the first step, without the load.
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
    detection_s: float = 0.0
    restart_s: float = SOAK_RESTART_S

    @property
    def failures_per_s(self) -> float:
        """Rate of failures of all GPUs and nodes together."""
        return self.num_gpus * self.gpu_failures_per_s + self.num_nodes * self.node_failures_per_s

    @property
    def mean_time_between_failures_s(self) -> float:
        """Infinite without failures."""
        return 1 / self.failures_per_s if self.failures_per_s else math.inf

    @property
    def full_speed_tokens_per_day(self) -> float:
        """Tokens per day without any interruption."""
        return self.tokens_per_step * DAY_S / self.step_s


def young_interval_s(stall_s: float, mtbf_s: float) -> float:
    """The best time of training between saves, to first order (Young 1974).

    Args:
        stall_s: time that a save stops training.
        mtbf_s: mean time between failures.
    """
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_interval_s(stall_s: float, mtbf_s: float) -> float:
    """The same to higher order (Daly 2006, equation 37)."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return young_interval_s(stall_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def best_save_interval(inputs: GoodputInputs) -> Optional[int]:
    """Daly's interval in steps; None without failures. Asynchronous saves are not due before the last is complete."""
    mtbf_s = inputs.mean_time_between_failures_s
    if math.isinf(mtbf_s):
        return None
    interval_s = max(daly_interval_s(inputs.stall_s, mtbf_s), min(inputs.write_s - inputs.stall_s, mtbf_s))
    return max(1, round(interval_s / inputs.step_s))


def time_parts(inputs: GoodputInputs, save_interval: Optional[int]) -> dict[str, float]:
    """Expected share of each part of the elapsed time; `USEFUL` is the effective training time.

    Daly's equation 20: `useful` seconds of training take M e^(R/M) (e^((tau + stall)/M) - 1) useful/tau, with M the
    mean time between failures, R the recovery and tau the training between saves. An asynchronous checkpoint counts
    write - stall later: that much more must pass without a failure after a recovery, as if it were a part of R.

    Args:
        save_interval: in steps; None: the run never saves, and must have no failures.
    """
    if save_interval is None:
        return {USEFUL: 1.0, SAVES: 0.0, LOST: 0.0, RESTARTS: 0.0}
    rate = inputs.failures_per_s
    recovery_s = inputs.detection_s + inputs.restart_s + inputs.load_s
    interval_s = save_interval * inputs.step_s
    stall_s = max(inputs.stall_s, inputs.write_s - interval_s)  # a save waits for the end of the one before
    cycle = (interval_s + stall_s) * rate
    growth = cycle / -math.expm1(-cycle) if cycle else 1.0
    useful = growth * interval_s / (interval_s + stall_s) * math.exp(-(recovery_s + interval_s + inputs.write_s) * rate)
    saves, restarts = useful * stall_s / interval_s, -math.expm1(-recovery_s * rate)
    return {USEFUL: useful, SAVES: saves, LOST: max(0.0, 1 - useful - saves - restarts), RESTARTS: restarts}
