"""When a run stops before its last step: flags say so, or a signal asks for it. Always on all ranks at one place."""

from __future__ import annotations

import signal
import time
from collections import Counter
from typing import Optional

import torch
import torch.distributed as dist

from megafp8.checkpoint.together import together
from megafp8.training.assemble import Run
from megafp8.training.guard import Guard


def reason_to_stop(run: Run, step: int, started: float) -> Optional[str]:
    """Why the run should save and stop after this step, the same on all ranks; None to go on."""
    training, guard = run.config.training, run.guard
    if guard.stop_agreed:
        return stopped_by_signals(guard)
    reason = None
    if training.exit_interval and step % training.exit_interval == 0:
        reason = f"--exit-interval {training.exit_interval}"
    elif training.exit_duration_in_mins is not None:
        # Clocks differ between ranks: one that is over stops all.
        over = time.monotonic() - started > 60 * training.exit_duration_in_mins
        if any_rank(run, over):
            reason = f"--exit-duration-in-mins {training.exit_duration_in_mins}"
    if reason is not None:
        guard.outcome, guard.reason = "stopped", reason
    return reason


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
    asked = together(lambda: guard.asked)
    counts = Counter(number for number in asked if number)
    reason = ", ".join(
        f"{signal.Signals(number).name} to " + (f"rank {asked.index(number)}" if count == 1 else f"{count} ranks")
        for number, count in counts.items()
    )
    guard.outcome, guard.reason = "preempted", reason
    return reason
