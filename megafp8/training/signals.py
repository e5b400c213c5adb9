"""Stop signals: all ranks agree on them, so that they stop at the same step."""

from __future__ import annotations

import signal
from collections import Counter

import torch
import torch.distributed as dist

from megafp8.device.collective_errors import call_on_all_ranks
from megafp8.resilience.watchdog import Watchdog
from megafp8.training.run import Run


def is_stop_requested(run: Run) -> bool:
    """Whether any rank got a stop signal; all ranks call it, outside of a step.

    Within a step the reduction of its totals exchanges the same, without this all-reduce.
    """
    if run.watchdog.handles_signals and not run.watchdog.stop_agreed:
        run.watchdog.agree_to_stop(any_rank(run, bool(run.watchdog.received_signal)))
    return run.watchdog.stop_agreed


def any_rank(run: Run, mine: bool) -> bool:
    """Logical OR over all ranks, which all call it."""
    flag = torch.tensor(float(mine), device=run.platform.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag > 0)


def record_stop_signals(watchdog: Watchdog) -> str:
    """Record in the watchdog that signals end the run, and return which ranks got which signals. All ranks call it."""
    received = call_on_all_ranks(lambda: watchdog.received_signal)
    counts = Counter(number for number in received if number)
    reason = ", ".join(
        f"{signal.Signals(number).name} to " + (f"rank {received.index(number)}" if count == 1 else f"{count} ranks")
        for number, count in counts.items()
    )
    watchdog.outcome, watchdog.reason = "preempted", reason
    return reason
