"""`--profile`: torch.profiler over a few steps, written as a trace for Chrome or Perfetto."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Optional

import torch
from torch.profiler import ProfilerAction

from megafp8.metrics.records import EventRecord
from megafp8.metrics.timers import PROFILE
from megafp8.training.extension import Extension, LoopState
from megafp8.training.extensions.profiler_ranges import named_ranges
from megafp8.training.run import Run, run_folder
from megafp8.training.step import StepResult
from megafp8.utils.best_effort import optional_write

RECORDED = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class Profiler(Extension):
    """Profiles steps `--profile-step-start` to `--profile-step-end`, counted from the start of this process.

    Only these steps have ranges.
    """

    def __init__(self) -> None:
        self.profile: Optional[torch.profiler.profile] = None
        self.ranges, self.has_ranges = ExitStack(), False

    def open(self, state: LoopState) -> None:
        logging = state.run.config.logging
        if logging.profile and state.run.rank_position.rank in logging.profile_ranks:
            self.profile = build_profile(state.run)
            self.profile.start()
            self.update_ranges(state)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        if self.profile is not None:
            with state.run.timer.span(PROFILE):
                self.profile.step()
                self.update_ranges(state)

    def close(self, state: LoopState, error: Optional[BaseException]) -> None:
        self.ranges.close()
        if self.profile is not None:
            self.profile.stop()

    def update_ranges(self, state: LoopState) -> None:
        """Add the ranges if the next step is the first profiled one, and remove them after the last."""
        assert self.profile is not None
        is_recorded = self.profile.current_action in RECORDED
        if is_recorded and not self.has_ranges:
            run = state.run
            self.ranges.enter_context(named_ranges(run.training_state.chunks, run.timer))
            if run.graph.has_graphs:
                detail = "replays of a CUDA graph have no ranges of layers: --cuda-graph-impl none shows them"
                state.sinks.write(EventRecord(step=state.step, name="profile", detail=detail))
        elif not is_recorded:
            self.ranges.close()
        self.has_ranges = is_recorded


def build_profile(run: Run) -> torch.profiler.profile:
    """The profiler of this rank; it writes `profile/rank<N>.json` in the run's folder or the working folder."""
    logging = run.config.logging
    target = (run_folder(run.config) or Path(".")) / "profile" / f"rank{run.rank_position.rank}.json"
    schedule = torch.profiler.schedule(
        wait=max(logging.profile_step_start - 1, 0),
        warmup=1 if logging.profile_step_start > 0 else 0,
        active=logging.profile_step_end - logging.profile_step_start,
        repeat=1,
    )

    def write(profile: torch.profiler.profile) -> None:
        with optional_write(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(target))

    return torch.profiler.profile(
        schedule=schedule,
        on_trace_ready=write,
        record_shapes=logging.profile_shapes,
        with_stack=logging.profile_callstack,
    )
