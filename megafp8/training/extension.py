"""The interface between the training loop and its extensions: the hooks that it calls, and the state that they share.

An extension is one concern of the loop, such as validation, checkpoints or replica checks. The loop knows none of them
by name. `extensions/__init__.py` lists them in the order of the calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Optional

from megafp8.checkpoint.progress import Progress
from megafp8.device.collective_errors import error_text
from megafp8.errors import CheckpointError, NumericsError
from megafp8.metrics.sinks import Sinks
from megafp8.metrics.step_totals import StepTotals
from megafp8.metrics.timers import DATA_WAIT, StepTimer
from megafp8.training.cuda_graph import Batch, StepHooks
from megafp8.training.evaluation import build_batches
from megafp8.training.run import Run
from megafp8.training.step import StepResult, progress_after_step


@dataclass
class LoopState:
    """The state of the training loop. The loop and its extensions change it.

    Attributes:
        sinks: write the records.
        progress: after the last completed step.
        started: start of training in this process, by `time.monotonic`.
        total_steps: the last step of the run.
        first_step: the first step of this process.
        batches: this rank's remaining microbatches.
        stop_reason: set by an extension to end the loop before the run's last step.
        needs_eager_step: set by an extension in `before_step`: the step must not replay a CUDA graph.
        step_hooks: hooks in the passes of the step, which extensions add in `before_step`.
        extensions: of the loop, in the order of the calls.
        saved_step: step of the newest checkpoint that this process wrote; None before the first.
    """

    run: Run
    sinks: Sinks
    progress: Progress
    started: float
    total_steps: int = field(init=False)
    first_step: int = field(init=False)
    batches: Optional[Generator[Batch, None, None]] = field(init=False, default=None)
    stop_reason: Optional[str] = None
    needs_eager_step: bool = False
    step_hooks: list[StepHooks] = field(default_factory=list)
    extensions: Sequence[Extension] = ()
    saved_step: Optional[int] = None

    def __post_init__(self) -> None:
        self.first_step = self.step + 1
        self.move_to(self.progress)

    @property
    def step(self) -> int:
        """The last completed step."""
        return self.progress.step

    @property
    def is_last(self) -> bool:
        """Whether no step follows."""
        return self.stop_reason is not None or self.step >= self.total_steps

    def advance(self, result: StepResult) -> None:
        """Count a completed step."""
        values = None
        if not result.is_skipped:
            assert result.grad_norm is not None
            values = result.loss, result.grad_norm
        self.progress = progress_after_step(self.run, self.progress, result.bad_step, values, result.changed_progress)

    def move_to(self, progress: Progress) -> None:
        """Continue training from another position in the data."""
        self.close()
        run, self.progress = self.run, progress
        self.total_steps, end = run.last_step(progress), run.end_sample(progress)
        batches = build_batches(run, run.datasets[0], progress.consumed_samples, end, run.config.data.num_workers)
        self.batches = None if batches is None else timed(batches, run.timer)

    def with_extensions(self, progress: Progress) -> Progress:
        """The progress with the present state of the extensions, as a checkpoint saves it."""
        states = {extension.name: values for extension in self.extensions if (values := extension.state())}
        return dataclasses.replace(progress, extensions=states)

    def load_extensions(self, progress: Progress) -> None:
        """Give every extension its state in the checkpoint of a progress.

        Raises:
            CheckpointError: an extension cannot read it.
        """
        for extension in self.extensions:
            try:
                extension.load_state(progress.extensions.get(extension.name, {}))
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                text = f"the checkpoint's state of {extension.name} cannot be read: {error_text(error)}"
                raise CheckpointError(text) from error

    def close(self) -> None:
        """End the loader processes, also if something, such as the traceback of an error, still refers to the state."""
        if self.batches is not None:
            self.batches.close()
            self.batches = None  # one that was never started keeps its loader until it is collected


def timed(batches: Generator[Batch, None, None], timer: StepTimer) -> Generator[Batch, None, None]:
    """The same batches; the time of waiting for them is a span of the step."""
    with contextlib.closing(batches):
        while True:
            with timer.span(DATA_WAIT):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


class Extension:
    """One concern of the training loop.

    All ranks call the methods of all extensions in the same order, so that extensions may use collectives.

    Attributes:
        span: the part of a step that the time of its methods counts for; None is the step without a name. What counts
            for no step, such as a validation, enters a span of its own (`metrics/timers.py`).
        name: of its state in checkpoints, which must not change; empty without state.
    """

    span: ClassVar[Optional[str]] = None
    name: ClassVar[str] = ""

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint saves of it: plain values, the same on all ranks; empty if there is nothing to save."""
        return {}

    def load_state(self, values: Mapping[str, Any]) -> None:
        """Before `open` and after a rollback, with what `state` gave or nothing; raises ValueError for other values."""

    def open(self, state: LoopState) -> None:
        """Before the first step. There is no step if it sets `state.stop_reason`."""

    def before_step(self, state: LoopState) -> None:
        """Before each step."""

    def before_update(self, state: LoopState, totals: StepTotals) -> None:
        """Within a step: gradients are finite and reduced, weights are not updated yet."""

    def after_step(self, state: LoopState, result: StepResult) -> None:
        """After each completed step; `state` includes it."""

    def recover(self, state: LoopState, error: NumericsError) -> bool:
        """After a bad step that may not be skipped; `state` is that before the step.

        Returns:
            Whether the loop can continue from `state`. Then the extensions after this one are not called.
        """
        return False

    def close(self, state: LoopState, error: Optional[BaseException]) -> None:
        """After the last step or an error. Called in reverse order on every extension that was opened."""


def is_multiple(step: int, interval: Optional[int]) -> bool:
    """Whether a step falls on an interval; never if the interval is None or 0."""
    return bool(interval and step % interval == 0)
