"""What is done whenever gradients of a bucket group are about to be reduced over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megafp8 import faults


def on_reduction(group: Any, action: Callable[[], None]) -> Callable[[], None]:
    """Do something each time that a bucket group's reduction starts, before it does.

    Returns:
        What ends that. Of several on one group, the last one has to be ended first.
    """
    start = group.start_grad_sync

    def act_and_start(*args: Any, **kwargs: Any) -> Any:
        action()
        return start(*args, **kwargs)

    def end() -> None:
        group.start_grad_sync = start

    group.start_grad_sync = act_and_start
    return end


def expose_to_faults(chunks: Sequence[Any]) -> None:
    """Let planned faults change this rank's gradients before they are reduced."""
    for chunk in chunks:
        for group in chunk.bucket_groups:
            on_reduction(group, partial(poison, group))


def poison(group: Any) -> None:
    """The place of a fault: each bucket of a group."""
    for bucket in group.buckets:
        faults.poison("step.gradients", bucket.grad_data)
