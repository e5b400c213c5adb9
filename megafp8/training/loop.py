"""The training loop: it makes steps and calls the extensions around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from megafp8.data.loader import loader_exits_as_data_errors
from megafp8.errors import NumericsError
from megafp8.metrics.step_totals import StepTotals
from megafp8.metrics.timers import RECORDS, ROLLBACK
from megafp8.training.extension import Extension, LoopState
from megafp8.training.step import train_step


def train_steps(state: LoopState, extensions: Sequence[Extension]) -> None:
    """Train until the run is complete or has to stop, and close the state; all ranks call it.

    Raises:
        NumericsError: a bad step that no extension recovers from.
        CheckpointError: an extension cannot read its state in the checkpoint.
    """
    state.extensions = extensions
    with loader_exits_as_data_errors(), closing(state), opened(extensions, state):
        state.run.timer.start()
        while not state.is_last:
            make_step(state, extensions)


def make_step(state: LoopState, extensions: Sequence[Extension]) -> None:
    """Train on one global batch, and call the extensions before and after it."""

    timer = state.run.timer

    def before_update(totals: StepTotals) -> None:
        for extension in extensions:
            with timer.span(extension.span):
                extension.before_update(state, totals)

    def write_records() -> None:
        with timer.span(RECORDS):
            state.sinks.flush()

    state.needs_eager_step, state.step_hooks = False, []
    for extension in extensions:
        with timer.span(extension.span):
            extension.before_step(state)
    try:
        result = train_step(
            state.run,
            state.batches,
            state.progress,
            before_update,
            state.needs_eager_step,
            state.step_hooks,
            after_launch=write_records,
        )
    except NumericsError as error:
        if not any(extension.recover(state, error) for extension in extensions):
            raise
        timer.set_aside(ROLLBACK)
        return
    state.advance(result)
    for extension in extensions:
        with timer.span(extension.span):
            extension.after_step(state, result)


@contextmanager
def opened(extensions: Sequence[Extension], state: LoopState) -> Iterator[None]:
    """Open the extensions, and close them in reverse order at the end, also after an error."""
    state.load_extensions(state.progress)
    with ExitStack() as stack:
        for extension in extensions:
            extension.open(state)
            stack.push(lambda _type, error, _traceback, extension=extension: extension.close(state, error))
        yield
