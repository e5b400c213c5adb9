"""Work beside the training loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def in_thread(action: Callable[..., T], *arguments: Any) -> Future[T]:
    """Start an action in a thread of its own; its result.

    A thread that hangs (a disk that does not answer) is left behind: unlike a pool's it keeps no program from ending.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(action(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name=f"megafp8-{getattr(action, '__name__', 'work')}").start()
    return future
