"""Records of the phases of data (`--data-phases`)."""

from __future__ import annotations

from bisect import bisect_right

from megafp8.config.data_phases import EVENT, first_samples, parse_phases
from megafp8.metrics.records import EventRecord
from megafp8.training.extension import Extension, LoopState
from megafp8.training.step import StepResult


class DataPhases(Extension):
    """Records a phase after the first step that read samples of it, some of which may be of the phase before."""

    def open(self, state: LoopState) -> None:
        run = state.run
        self.names = [phase.name for phase in parse_phases(run.config.data)]
        self.starts = first_samples(run.config, run.rank_position.world_size)
        self.num_begun = self.begun(state)

    def begun(self, state: LoopState) -> int:
        """Phases of which samples have been read."""
        return bisect_right(self.starts, state.progress.consumed_samples - 1)

    def after_step(self, state: LoopState, result: StepResult) -> None:
        before, self.num_begun = self.num_begun, self.begun(state)
        for name, start in list(zip(self.names, self.starts, strict=True))[before : self.num_begun]:
            detail = f"{name}, from sample {start:,}"
            state.sinks.write(EventRecord(step=state.step, name=EVENT, detail=detail))
