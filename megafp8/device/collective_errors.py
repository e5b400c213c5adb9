"""Errors in collective actions: if an action fails on one rank, all ranks raise, and none hangs in a collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from megafp8.errors import CheckpointError, Megafp8Error, PeerLost

T = TypeVar("T")


def call_on_all_ranks(action: Callable[[], T]) -> list[T]:
    """Run an action on every rank. All ranks must call it; it is a barrier.

    Without a process group, as in a dry run, this process is the only rank.

    Returns:
        The results by rank.

    Raises:
        CheckpointError: on all ranks, if `action` raised on any rank; names the first rank on which it did.
        PeerLost: another rank is gone, so the ranks cannot exchange results.
    """
    result: Optional[T] = None
    error: Optional[BaseException] = None
    try:
        result = action()
    except (Exception, CheckpointException) as raised:  # torch's CheckpointException is no Exception
        error = raised
    answer = result, None if error is None else error_text(error)
    answers: list[tuple[Optional[T], Optional[str]]] = [answer] * rank_and_size()[1]
    if dist.is_initialized():
        try:
            dist.all_gather_object(answers, answer)
        except RuntimeError as lost:
            raise PeerLost(f"another rank was lost: {lost}") from (error or lost)
    failed = [(rank, text) for rank, (_, text) in enumerate(answers) if text is not None]
    if failed:
        rank, text = failed[0]
        raise CheckpointError(text if len(answers) == 1 else f"rank {rank}: {text}") from error
    return [result for result, _ in answers]  # type: ignore[misc]


def call_on_rank_0(action: Callable[[], T]) -> T:
    """Run an action on rank 0 and return its result on all ranks. All ranks must call it.

    Raises:
        CheckpointError: on all ranks, if `action` raised.
        PeerLost: another rank is gone.
    """
    return call_on_all_ranks(lambda: action() if rank_and_size()[0] == 0 else None)[0]  # type: ignore[return-value]


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks of the process group; 0 and 1 without one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def raise_peer_lost(error: BaseException) -> None:
    """Raise if a collective failed because another rank is gone, as opposed to a failed operation.

    Only this rank and its neighbors see the error. If they treated it as a failed save and entered the next collective,
    they would wait there for ranks that are still in the previous one.

    Raises:
        PeerLost: another rank is gone.
    """
    causes = [each[0] for each in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    for cause in causes:
        # gloo raises a plain RuntimeError whose text has its source file.
        if isinstance(cause, dist.DistError) or (isinstance(cause, RuntimeError) and "/gloo/" in str(cause)):
            raise PeerLost(f"another rank was lost: {cause}") from error


def error_text(error: BaseException) -> str:
    """The error in one line. torch's CheckpointException would print the tracebacks of all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error) if isinstance(error, Megafp8Error) else f"{type(error).__name__}: {error}"
