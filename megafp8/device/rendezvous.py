"""The ranks of a run meet at the launcher's store, within a bound of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from megafp8.errors import PeerLost

# Ranks that are named; the others are counted.
MOST_NAMED = 16


def meet(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT, once all ranks have reached it.

    torchrun has opened it before it starts a rank; with any other launcher rank 0 opens it here.

    Args:
        timeout_s: for all ranks to arrive, counted on each from its own arrival.

    Raises:
        PeerLost: the store cannot be reached, or some ranks did not arrive; the text names them.
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
        # torchrun keeps one store over its restarts.
        arrivals = dist.PrefixStore(f"megafp8/arrived/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        arrivals.set(str(rank), socket.gethostname())
    except RuntimeError as error:
        raise PeerLost(
            f"rank {rank} cannot reach the other ranks: {first_line(error)}. MASTER_ADDR and MASTER_PORT name the "
            "store of the launcher: has it ended, or is the port closed between the nodes?"
        ) from error
    everyone = [str(number) for number in range(world_size)]
    try:
        arrivals.wait(everyone, timedelta(seconds=max(1.0, deadline - time.monotonic())))
    except RuntimeError as error:
        raise PeerLost(missing_text(arrivals, world_size, timeout_s, error)) from error
    return store


def missing_text(arrivals: dist.Store, world_size: int, timeout_s: float, error: RuntimeError) -> str:
    """Which ranks did not arrive."""
    missing: list[int] = []
    with contextlib.suppress(RuntimeError):  # the store may be what is gone
        missing = [number for number in range(world_size) if not arrivals.check([str(number)])]
    if not missing:
        return f"the ranks' store is gone before all {world_size} ranks arrived: {first_line(error)}"
    return (
        f"{named(missing)} of {world_size} did not arrive within {timeout_s:g} s (--rendezvous-timeout-s). Their own "
        "output says why; where they only start more slowly, raise the limit"
    )


def named(ranks: Sequence[int]) -> str:
    """Ranks by number, as far as they fit a line."""
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:MOST_NAMED]))}{more}"


def first_line(error: BaseException) -> str:
    """torch's errors carry stacks of C++, or no text at all."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def wait_for_listener(host: str, port: int, timeout_s: float) -> None:
    """Until somebody listens there; torch's own way of meeting waits up to three times as long as it is told.

    Raises:
        RuntimeError: nobody did in time.
    """
    deadline = time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=left_s):
            return
        time.sleep(0.1)
    raise RuntimeError(f"nobody listened on {host}:{port} within {timeout_s:.0f} s")
