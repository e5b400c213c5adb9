"""When a run saves, and what becomes of a save that fails."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Optional

from megafp8 import faults
from megafp8.checkpoint.save import save_checkpoint
from megafp8.checkpoint.state import Progress
from megafp8.errors import CheckpointError
from megafp8.telemetry.records import EventRecord
from megafp8.telemetry.sinks import Sinks
from megafp8.training.assemble import Run


def is_save_due(run: Run, step: int, total_steps: int, reason: Optional[str]) -> bool:
    """At the interval, at the end, and before stopping."""
    interval = run.config.checkpoint.save_interval
    return reason is not None or step == total_steps or bool(interval and step % interval == 0)


def save(run: Run, sinks: Sinks, progress: Progress, folder: Path, is_last: bool) -> bool:
    """Write a checkpoint and record it; whether it is there now.

    Raises:
        CheckpointError: it could not be written, and it was the last one that this run would write.
    """
    began = time.monotonic()
    samples = None if run.sample_chain is None else run.sample_chain.mark(progress.consumed_samples)
    try:
        path = save_checkpoint(folder, run.config, run.trainee, progress, samples)
        faults.point("save.end")
    except CheckpointError as error:
        sinks.write(EventRecord(step=progress.step, name="checkpoint failed", detail=str(error)))
        if is_last:
            raise
        if run.place.rank == 0:
            print(f"megafp8: {error}; training goes on without it", file=sys.stderr, flush=True)
        return False
    sinks.write(
        EventRecord(step=progress.step, name="checkpoint saved", detail=f"{path} in {time.monotonic() - began:.1f} s")
    )
    return True
