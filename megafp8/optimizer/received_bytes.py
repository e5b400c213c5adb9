"""Bytes that a rank receives from other ranks, between two readings."""

from __future__ import annotations


class ReceivedBytes:
    """Base class of what counts its communication in `received_bytes`."""

    received_bytes: int = 0

    def take(self) -> int:
        """Return the bytes received since the last call."""
        received, self.received_bytes = self.received_bytes, 0
        return received
