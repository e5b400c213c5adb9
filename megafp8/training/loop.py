"""The training loop: steps, and the extensions around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Optional

from megafp8.data.loader import loader_deaths_explained
from megafp8.errors import NumericsError
from megafp8.optimizer.gradient_checks import StepTotals
from megafp8.training.extension import Extension, LoopState
from megafp8.training.step import train_step


def train_steps(state: LoopState, extensions: Sequence[Extension]) -> None:
    """Train until the run is done or has to stop; all ranks call it.

    Raises:
        NumericsError: bad numbers that no extension recovers from.
    """
    with loader_deaths_explained(), opened(extensions, state):
        while not state.is_last:
            make_step(state, extensions)


def make_step(state: LoopState, extensions: Sequence[Extension]) -> None:
    """Train on one global batch, and call the extensions before and after it."""

    def before_update(totals: StepTotals) -> None:
        for extension in extensions:
            extension.before_update(state, totals)

    state.needs_eager_step = False
    for extension in extensions:
        extension.before_step(state)
    try:
        result = train_step(state.run, state.batches, state.progress, before_update, state.needs_eager_step)
    except NumericsError as error:
        if not any(extension.recover(state, error) for extension in extensions):
            raise
        return
    state.advance(result)
    for extension in extensions:
        extension.after_step(state, result)


@contextmanager
def opened(extensions: Sequence[Extension], state: LoopState) -> Iterator[None]:
    """Within, the extensions are open. They are closed in reverse order, also after an error."""

    def close(
        extension: Extension,
        error_type: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        extension.close(state, error)

    with ExitStack() as stack:
        for extension in extensions:
            extension.open(state)
            stack.push(partial(close, extension))
        yield
