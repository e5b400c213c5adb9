"""Network ports for programs that run concurrently."""

from __future__ import annotations

import contextlib
import random
import socket

# Above them the system hands out ports to whoever asks for any, NCCL's connections among them: one that was free a
# moment ago may be taken before its program listens.
FIRST, END = 10_000, 32_768
NUM_POSITIONS = 100
ANY = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """Ports in a row that nobody listens on.

    Raises:
        RuntimeError: there are none, after many tries.
    """
    for first in ANY.sample(range(FIRST, END - count), NUM_POSITIONS):
        ports = list(range(first, first + count))
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in ports:
                stack.enter_context(socket.socket()).bind(("", port))
            return ports
    raise RuntimeError(f"no {count} ports in a row are free between {FIRST} and {END}: tried {NUM_POSITIONS} places")
