"""`--profile`: torch's profiler over a few steps, written as a trace that Chrome and Perfetto open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Optional

import torch

from megafp8.training.assemble import Run


@contextmanager
def profiler(run: Run, folder: Optional[Path]) -> Iterator[Callable[[], None]]:
    """Gives a function to call after each step. Steps count from the start of this process.

    The trace goes to `profile/rank<N>.json` in the run's folder (in the working folder without one).
    """
    logging = run.config.logging
    if not logging.profile or run.place.rank not in logging.profile_ranks:
        yield lambda: None
        return
    target = (folder or Path(".")) / "profile"
    target.mkdir(parents=True, exist_ok=True)
    schedule = torch.profiler.schedule(
        wait=max(logging.profile_step_start - 1, 0),
        warmup=1 if logging.profile_step_start > 0 else 0,
        active=logging.profile_step_end - logging.profile_step_start,
        repeat=1,
    )

    def write(profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(target / f"rank{run.place.rank}.json"))

    with torch.profiler.profile(schedule=schedule, on_trace_ready=write) as profile:
        yield profile.step
