"""Errors in collective actions: if an action fails on one rank, all ranks raise, and none hangs in a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from megafp8.errors import CheckpointError, Megafp8Error, OutOfMemory, PeerLost
from megafp8.utils.memory import cause

T = TypeVar("T")


def call_on_all_ranks(action: Callable[[], T]) -> list[T]:
    """Run an action on every rank. All ranks must call it; it is a barrier.

    Without a process group, as in a dry run, this process is the only rank.

    Returns:
        The results by rank.

    Raises:
        CheckpointError: on all ranks, if `action` raised on any rank; names the first rank on which it did.
        OutOfMemory: the same, if that rank lacked memory.
        PeerLost: another rank is gone, so the ranks cannot exchange results.
    """
    result: Optional[T] = None
    error: Optional[BaseException] = None
    try:
        result = action()
    except (Exception, CheckpointException) as raised:  # torch's CheckpointException is no Exception
        error = raised
    kind: type[Megafp8Error] = OutOfMemory if lacks_memory(error) else CheckpointError
    answer = result, None if error is None else (kind, error_text(error))
    answers: list[tuple[Optional[T], Optional[tuple[type[Megafp8Error], str]]]] = [answer] * rank_and_size()[1]
    if dist.is_initialized():
        try:
            dist.all_gather_object(answers, answer)
        except RuntimeError as lost:
            raise PeerLost(f"another rank was lost: {lost}") from (error or lost)
    for rank, (_, failure) in enumerate(answers):
        if failure is not None:
            kind, text = failure
            raise kind(text if len(answers) == 1 else f"rank {rank}: {text}") from error
    return [result for result, _ in answers]  # type: ignore[misc]


def call_on_rank_0(action: Callable[[], T]) -> T:
    """Run an action on rank 0 and return its result on all ranks. All ranks must call it.

    Raises:
        CheckpointError: on all ranks, if `action` raised.
        PeerLost: another rank is gone.
    """
    answer: list[Optional[T]] = [None]

    def call() -> None:
        if rank_and_size()[0] == 0:
            answer[0] = action()

    call_on_all_ranks(call)
    if dist.is_initialized():
        with lost_peers():
            dist.broadcast_object_list(answer, src=0)
    return answer[0]  # type: ignore[return-value]


def gather_on_rank_0(action: Callable[[], T]) -> list[T]:
    """Run an action on every rank and return its results by rank on rank 0, nothing on the others.

    All ranks must call it. For large results: with `call_on_all_ranks` each rank would have those of all.

    Raises:
        CheckpointError: on all ranks, if `action` raised on any rank.
        PeerLost: another rank is gone.
    """
    own: list[T] = []
    call_on_all_ranks(lambda: own.append(action()))
    rank, size = rank_and_size()
    if size == 1:
        return own
    results: Optional[list[Any]] = [None] * size if rank == 0 else None
    with lost_peers():
        dist.gather_object(own[0], results, dst=0)
    return results or []


@contextmanager
def lost_peers() -> Iterator[None]:
    """Convert the error of a collective that another rank does not take part in.

    Raises:
        PeerLost: another rank is gone.
    """
    try:
        yield
    except RuntimeError as lost:
        raise PeerLost(f"another rank was lost: {lost}") from lost


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
    for each in errors_of_ranks(error):
        # gloo raises a plain RuntimeError whose text has its source file.
        if isinstance(each, dist.DistError) or (isinstance(each, RuntimeError) and "/gloo/" in str(each)):
            raise PeerLost(f"another rank was lost: {each}") from error


def lacks_memory(error: Optional[BaseException]) -> bool:
    """Whether the error, or that of one of the ranks, means lack of memory."""
    return any(isinstance(each, OutOfMemory) or cause(each) for each in errors_of_ranks(error))


def errors_of_ranks(error: Optional[BaseException]) -> list[BaseException]:
    """The errors in torch's CheckpointException; of another error, itself."""
    if isinstance(error, CheckpointException):
        return [each[0] for each in error.failures.values()]
    return [] if error is None else [error]


def raise_no_memory(error: BaseException) -> None:
    """Raise what failed if memory was lacking, as opposed to a damaged file.

    Raises:
        Exception: what failed for lack of memory.
    """
    for each in errors_of_ranks(error):
        if cause(each):
            raise each


def error_text(error: BaseException) -> str:
    """The error in one line. torch's CheckpointException would print the tracebacks of all ranks."""
    error = next(iter(errors_of_ranks(error)), error)
    return str(error) if isinstance(error, Megafp8Error) else f"{type(error).__name__}: {error}"
