"""Leave to change what others see in a folder of checkpoints, which a save loses when it takes too long."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Optional

from megafp8.errors import CheckpointError

# For a rename or a small file that is under way; a disk that hangs in one is not waited for.
PATIENCE_S = 5.0


class Permit:
    """`with permit:` around each change. A thread cannot be ended from outside, so it asks before what it does."""

    def __init__(self) -> None:
        self._is_revoked = False
        self._change = threading.Lock()

    def __enter__(self) -> None:
        """
        Raises:
            CheckpointError: it is revoked.
        """
        self._change.acquire()
        if self._is_revoked:
            self._change.release()
            raise CheckpointError("the save was given up before")

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._change.release()

    def revoke(self) -> None:
        """No change begins any more; the one that is under way has ended when this returns, unless it hangs."""
        self._is_revoked = True
        if self._change.acquire(timeout=PATIENCE_S):
            self._change.release()
