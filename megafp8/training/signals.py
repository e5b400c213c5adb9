"""Signals that end a run: the ranks agree on them, always at the same place."""

from __future__ import annotations

import signal
from collections import Counter

import torch
import torch.distributed as dist

from megafp8.device.collective_errors import call_on_all_ranks
from megafp8.resilience.watchdog import Guard
from megafp8.training.run import Run


def is_asked_to_stop(run: Run) -> bool:
    """Whether a signal asked any rank to stop. For places outside of a step, whose totals tell it without this
    all-reduce; all ranks call it."""
    if run.guard.takes_signals and not run.guard.stop_agreed:
        run.guard.agree(any_rank(run, bool(run.guard.asked)))
    return run.guard.stop_agreed


def any_rank(run: Run, mine: bool) -> bool:
    """Whether something holds on any rank; all ranks call it."""
    flag = torch.tensor(float(mine), device=run.platform.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag > 0)


def stopped_by_signals(guard: Guard) -> str:
    """Note that signals end the run; which came to which ranks, in words. All ranks call it."""
    asked = call_on_all_ranks(lambda: guard.asked)
    counts = Counter(number for number in asked if number)
    reason = ", ".join(
        f"{signal.Signals(number).name} to " + (f"rank {asked.index(number)}" if count == 1 else f"{count} ranks")
        for number, count in counts.items()
    )
    guard.outcome, guard.reason = "preempted", reason
    return reason
