"""Rendezvous of the ranks of a run at the launcher's store, with its own timeout."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from megafp8.errors import PeerLost

# Missing ranks that an error lists; further ones are counted.
MAX_LISTED_RANKS = 16


def join_store(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Connect to the store at MASTER_ADDR and MASTER_PORT, and return it when all ranks have arrived.

    torchrun hosts the store itself. With any other launcher, rank 0 hosts it.

    Args:
        timeout_s: time for all ranks to arrive; each rank counts from its own arrival.

    Raises:
        PeerLost: the store cannot be reached, or some ranks did not arrive; the text lists them.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline = time.monotonic() + timeout_s
    try:
        if not is_host:
            wait_for_listener(host, port, timeout_s)
        store = dist.TCPStore(
            host, port, is_master=is_host, timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
            multi_tenant=is_host,
        )  # fmt: skip
        # torchrun keeps the same store across restarts.
        arrivals = dist.PrefixStore(f"megafp8/arrived/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        arrivals.set(str(rank), socket.gethostname())
    except RuntimeError as error:
        raise PeerLost(
            f"rank {rank} cannot reach the other ranks: {first_line(error)}. MASTER_ADDR and MASTER_PORT must be the "
            "launcher's store: check that the launcher is running and that the port is open between the nodes"
        ) from error
    try:
        arrivals.wait(
            [str(number) for number in range(world_size)], timedelta(seconds=max(1.0, deadline - time.monotonic()))
        )
    except RuntimeError as error:
        raise PeerLost(missing_ranks_text(arrivals, world_size, timeout_s, error)) from error
    return store


def missing_ranks_text(arrivals: dist.Store, world_size: int, timeout_s: float, error: RuntimeError) -> str:
    """An error text that lists the ranks that did not arrive."""
    missing: list[int] = []
    with contextlib.suppress(RuntimeError):  # the store itself may be gone
        missing = [number for number in range(world_size) if not arrivals.check([str(number)])]
    if not missing:
        return f"the store of the ranks was lost before all {world_size} ranks connected: {first_line(error)}"
    return (
        f"{ranks_text(missing)} of {world_size} did not connect within {timeout_s:g} s (--rendezvous-timeout-s). See "
        "their output for the reason; if they only start slowly, raise the timeout"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """A list of ranks as text, shortened to `MAX_LISTED_RANKS`."""
    more = f" and {len(ranks) - MAX_LISTED_RANKS} more" if len(ranks) > MAX_LISTED_RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:MAX_LISTED_RANKS]))}{more}"


def first_line(error: BaseException) -> str:
    """The first line of an error, without torch's C++ stack; its type if it has no text."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def wait_for_listener(host: str, port: int, timeout_s: float) -> None:
    """Wait until a process listens on a port. torch's own rendezvous may wait three times as long as its timeout.

    Raises:
        RuntimeError: there was no listener in time.
    """
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=left_s):
            return
        time.sleep(0.1)
    raise RuntimeError(f"no connection to {host}:{port} within {timeout_s:.0f} s")
