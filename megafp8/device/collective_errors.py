"""Steps of a save or load that all ranks take together: if one fails, all raise, and none waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from megafp8.errors import CheckpointError, Megafp8Error, PeerLost

T = TypeVar("T")


def call_on_all_ranks(action: Callable[[], T]) -> list[T]:
    """Do something on every rank; all ranks call it, and it is a barrier.

    Returns:
        The results by rank.

    Raises:
        CheckpointError: on all ranks, when `action` raised on any; the text names the first that it failed on.
        PeerLost: a rank is gone, so that nothing can be agreed on.
    """
    result: Optional[T] = None
    error: Optional[BaseException] = None
    try:
        result = action()
    except (Exception, CheckpointException) as raised:  # torch's is no Exception
        error = raised
    answers: list[tuple[Optional[T], Optional[str]]] = [(None, None)] * dist.get_world_size()
    try:
        dist.all_gather_object(answers, (result, None if error is None else reason(error)))
    except RuntimeError as lost:
        raise PeerLost(f"another rank is gone: {lost}") from (error or lost)
    failed = [(rank, text) for rank, (_, text) in enumerate(answers) if text is not None]
    if failed:
        rank, text = failed[0]
        raise CheckpointError(text if len(answers) == 1 else f"rank {rank}: {text}") from error
    return [result for result, _ in answers]  # type: ignore[misc]


def on_rank_0(action: Callable[[], T]) -> T:
    """Do something on rank 0 and give its result to all; all ranks call it.

    Raises:
        CheckpointError: on all ranks, when it raised.
    """
    return call_on_all_ranks(lambda: action() if dist.get_rank() == 0 else None)[0]  # type: ignore[return-value]


def raise_peer_lost(error: BaseException) -> None:
    """Tell an operation that failed from a rank that is gone.

    Only this rank and its neighbours know of that: whoever took it for a failed save, and went on to the next
    collective, would wait there for ranks that still wait in the last one.

    Raises:
        PeerLost: it is gone.
    """
    causes = [each[0] for each in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    for cause in causes:
        # gloo raises nothing more particular, and names its source file.
        if isinstance(cause, dist.DistError) or (isinstance(cause, RuntimeError) and "/gloo/" in str(cause)):
            raise PeerLost(f"another rank is gone: {cause}") from error


def reason(error: BaseException) -> str:
    """What went wrong in one line: torch's own exception prints the tracebacks of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error) if isinstance(error, Megafp8Error) else f"{type(error).__name__}: {error}"
