"""Reductions under way: of a bucket, of parts of it, and of the buckets of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, Protocol

from torch import Tensor

from megafp8.mcore.grad_reduction import Work


class BucketWork:
    """The reduction of a bucket, or of a part of it, under way. On a GPU only the device waits.

    Args:
        work: of the all-to-all.
        held: tensors that the collective reads.
        finish: called when it has ended. It may return a function that waits for the sums of other ranks.
    """

    def __init__(self, work: Any, held: tuple[Tensor, ...], finish: Callable[[], Optional[Callable[[], None]]]):
        self._work, self._held = work, held
        self._finish: Optional[Callable[[], Optional[Callable[[], None]]]] = finish
        self._receive: Optional[Callable[[], None]] = None

    def add(self) -> None:
        """Wait for the codes and add them; in an all-reduce, start to send the sums."""
        self._work.wait()
        assert self._finish is not None, "it is added already"
        self._receive = self._finish()
        self._held, self._finish = (), None  # what they hold is not needed any more

    def receive(self) -> None:
        """In an all-reduce, wait for the sums of other ranks."""
        if self._receive is not None:
            self._receive()

    def wait(self) -> None:
        """Finish it."""
        self.add()
        self.receive()


class BucketWorks:
    """Reductions of the buckets of a group, or of the parts of a bucket.

    The codes of one are added while those of the next ones are sent.
    """

    def __init__(self, works: Sequence[PartialWork]):
        self._works = works

    def add(self) -> None:
        """`BucketWork.add` of all."""
        # In the order in which they were started: the first one has had the most time to arrive.
        for work in self._works:
            work.add()

    def receive(self) -> None:
        """`BucketWork.receive` of all."""
        for work in self._works:
            work.receive()

    def wait(self) -> None:
        """Finish all."""
        self.add()
        self.receive()


class PartialWork(Work, Protocol):
    """A reduction in two phases."""

    def add(self) -> None:
        """Wait for the codes and add them."""

    def receive(self) -> None:
        """In an all-reduce, wait for the sums of other ranks."""
