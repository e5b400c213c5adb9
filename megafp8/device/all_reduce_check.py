"""One rank of the all-reduces that try out nodes before a job: within its node, then with each of its two neighbours.

    python -m megafp8.device.all_reduce_check '{"nodes": ["a", "b"], "node": 0, "rank": 0, ...}'

The argument is a `megafp8.launch.node_check.NodeRank`. A line of JSON for each group goes to standard output as
soon as it is known; who started this bounds its time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Optional
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from megafp8.device.rendezvous import wait_for_listener
from megafp8.launch.node_check import PORTS, NodeRank, links_of, members_of
from megafp8.utils.strict_json import parse_json

GPU_BYTES, CPU_BYTES = 256 << 20, 1 << 20
REPEATS = 5


def try_group(place: NodeRank, meeting: str, rank: int, size: int, timeout_s: float) -> float:
    """All-reduce among some ranks; seconds of one.

    Raises:
        RuntimeError: they did not meet in time, or sums are wrong.
    """
    device = torch.device("cuda", place.rank) if place.is_gpu else torch.device("cpu")
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if place.is_gpu else "gloo"
    address = urlsplit(meeting)
    if rank and address.port:
        wait_for_listener(str(address.hostname), address.port, timeout_s)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size, timeout=timeout)
    try:
        values = torch.empty((GPU_BYTES if place.is_gpu else CPU_BYTES) // 4, device=device)
        began = 0.0
        for number in range(REPEATS + 1):
            if number == 1:  # the first one connects
                began = time.perf_counter()
            dist.all_reduce(values.fill_(rank + 1))
        if place.is_gpu:
            torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - began) / REPEATS
        expected = size * (size + 1) / 2
        if not bool((values == expected).all()):
            raise RuntimeError(f"the sum of 1 to {size} came out as {values[values != expected][0].item()}")
        return seconds
    finally:
        dist.destroy_process_group()


def report(members: Sequence[int], num_bytes: int, seconds: Optional[float], error: Optional[str]) -> None:
    """One result, for who started this."""
    line = {"members": list(members), "bytes": num_bytes, "seconds": seconds, "error": error}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main(text: str) -> None:
    place = NodeRank(**parse_json(text))
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # an all-reduce that never ends becomes an error
    size, num_nodes = place.ranks_per_node, len(place.nodes)
    groups = [([place.node], f"file://{place.store}", place.rank, size)]
    for link in links_of(place.node, num_nodes):
        members = list(members_of(link, num_nodes))
        meeting = f"tcp://{place.nodes[link]}:{place.port + 1 + link % (PORTS - 1)}"
        groups.append((members, meeting, members.index(place.node) * size + place.rank, 2 * size))
    num_bytes = GPU_BYTES if place.is_gpu else CPU_BYTES
    began = time.monotonic()
    for number, (members, meeting, rank, group_size) in enumerate(groups):
        # The other ranks may have waited in vain for all groups before this one.
        timeout_s = max(place.timeout_s, (number + 1) * place.timeout_s - (time.monotonic() - began))
        try:
            if place.is_gpu:
                torch.cuda.set_device(place.rank)
            report(members, num_bytes, try_group(place, meeting, rank, group_size, timeout_s), None)
        except (RuntimeError, ValueError) as error:
            report(members, num_bytes, None, str(error).splitlines()[0])


if __name__ == "__main__":
    main(sys.argv[1])
