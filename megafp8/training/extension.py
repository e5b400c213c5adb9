"""What the training loop offers to its extensions: the moments at which it calls them, and the state that it shares.

An extension is one concern of the loop: validation, checkpoints, replica checks. The loop knows none of them by name.
`extensions/__init__.py` has the list, whose order is the order of the calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from megafp8.checkpoint.progress import Progress
from megafp8.config import derived
from megafp8.errors import NumericsError
from megafp8.metrics.sinks import Sinks
from megafp8.optimizer.gradient_checks import StepTotals
from megafp8.training.bad_steps import next_progress
from megafp8.training.evaluation import build_batches
from megafp8.training.run import Run
from megafp8.training.step import Batches, StepResult


@dataclass
class LoopState:
    """The state of the training loop. The loop and its extensions change it.

    Attributes:
        sinks: where records go.
        progress: after the last step.
        started: when this process started to train, by `time.monotonic`.
        first_step: the first step of this process.
        batches: this rank's microbatches from here to the end of the run.
        stop_reason: set by an extension to end the loop before the run's last step.
        needs_eager_step: set by an extension in `before_step`: the step must not replay its CUDA graph.
        saved_step: step of the newest checkpoint that this process wrote; None before the first.
    """

    run: Run
    sinks: Sinks
    progress: Progress
    total_steps: int
    started: float
    first_step: int = field(init=False)
    batches: Batches = field(init=False)
    stop_reason: Optional[str] = None
    needs_eager_step: bool = False
    saved_step: Optional[int] = None

    def __post_init__(self) -> None:
        self.first_step = self.step + 1
        self.move_to(self.progress)

    @property
    def step(self) -> int:
        """The last step that was done."""
        return self.progress.step

    @property
    def is_last(self) -> bool:
        """Whether no step follows."""
        return self.stop_reason is not None or self.step >= self.total_steps

    def advance(self, result: StepResult) -> None:
        """Count a step."""
        numbers = None if result.is_skipped else (result.loss, result.grad_norm)
        self.progress = next_progress(self.run, self.progress, result.finding, numbers)

    def move_to(self, progress: Progress) -> None:
        """Continue from another place in the data."""
        run = self.run
        end = derived.train_samples(run.config, run.place.world_size)
        self.progress = progress
        self.batches = build_batches(run, run.datasets[0], progress.consumed_samples, end, run.config.data.num_workers)


class Extension:
    """One concern of the training loop.

    All ranks call all methods, extension by extension, in the order of the list.
    """

    def open(self, state: LoopState) -> None:
        """Before the first step. May set `state.stop_reason`: then there is none."""

    def before_step(self, state: LoopState) -> None:
        """Before each step."""

    def before_update(self, state: LoopState, totals: StepTotals) -> None:
        """Within a step: gradients are finite and reduced, weights are as before."""

    def after_step(self, state: LoopState, result: StepResult) -> None:
        """After each step that did not fail; `state` is that after the step."""

    def recover(self, state: LoopState, error: NumericsError) -> bool:
        """After a step that failed with bad numbers; `state` is that before the step.

        Returns:
            Whether the loop can continue from `state`. The extensions after this one are not asked then.
        """
        return False

    def close(self, state: LoopState, error: Optional[BaseException]) -> None:
        """After the last step, or after an error. Called in reverse order, of all extensions that were opened."""


def is_multiple(step: int, interval: Optional[int]) -> bool:
    """Whether a step is due at an interval; none is without one."""
    return bool(interval and step % interval == 0)
