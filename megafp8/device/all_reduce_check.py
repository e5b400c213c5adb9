"""Program of the node check: one rank of the all-reduces within its node, and with each of its two neighbors.

    python -m megafp8.device.all_reduce_check '{"nodes": ["a", "b"], "node": 0, "rank": 0, ...}'

The argument is a `megafp8.device.node_check_ranks.NodeRank`. The result of each group is printed immediately as a line
of JSON. The parent process limits the total time.
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

from megafp8.device.node_check_ranks import NUM_CHECK_PORTS, NodeRank, link_members, node_links
from megafp8.device.rendezvous import wait_for_listener
from megafp8.utils.strict_json import parse_json

GPU_BYTES, CPU_BYTES = 256 << 20, 1 << 20
NUM_REPEATS = 5


def time_all_reduce(node_rank: NodeRank, init_method: str, rank: int, size: int, timeout_s: float) -> float:
    """Seconds of an all-reduce in a group of ranks.

    Raises:
        RuntimeError: not all ranks arrived in time, or the sum is wrong.
    """
    device = torch.device("cuda", node_rank.rank) if node_rank.is_gpu else torch.device("cpu")
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if node_rank.is_gpu else "gloo"
    address = urlsplit(init_method)
    if rank and address.port:
        wait_for_listener(str(address.hostname), address.port, timeout_s)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=timeout)
    try:
        values = torch.empty((GPU_BYTES if node_rank.is_gpu else CPU_BYTES) // 4, device=device)
        start = 0.0
        for repeat in range(NUM_REPEATS + 1):
            if repeat == 1:  # the first all-reduce connects the ranks
                start = time.perf_counter()
            dist.all_reduce(values.fill_(rank + 1))
        if node_rank.is_gpu:
            torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - start) / NUM_REPEATS
        expected = size * (size + 1) / 2
        if not bool((values == expected).all()):
            raise RuntimeError(f"the sum of 1 to {size} was {values[values != expected][0].item()}")
        return seconds
    finally:
        dist.destroy_process_group()


def report(members: Sequence[int], num_bytes: int, seconds: Optional[float], error: Optional[str]) -> None:
    """Print one result for the parent process."""
    line = {"members": list(members), "bytes": num_bytes, "seconds": seconds, "error": error}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main(text: str) -> None:
    node_rank = NodeRank(**parse_json(text))
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # turns a hanging all-reduce into an error
    size, num_nodes = node_rank.ranks_per_node, len(node_rank.nodes)
    groups = [([node_rank.node], f"file://{node_rank.store}", node_rank.rank, size)]
    for link in node_links(node_rank.node, num_nodes):
        members = list(link_members(link, num_nodes))
        init_method = f"tcp://{node_rank.nodes[link]}:{node_rank.port + 1 + link % (NUM_CHECK_PORTS - 1)}"
        groups.append((members, init_method, members.index(node_rank.node) * size + node_rank.rank, 2 * size))
    num_bytes = GPU_BYTES if node_rank.is_gpu else CPU_BYTES
    began = time.monotonic()
    for number, (members, init_method, rank, group_size) in enumerate(groups):
        # Other ranks may have waited for the full timeout in every group before this one.
        timeout_s = max(node_rank.timeout_s, (number + 1) * node_rank.timeout_s - (time.monotonic() - began))
        try:
            if node_rank.is_gpu:
                torch.cuda.set_device(node_rank.rank)
            report(members, num_bytes, time_all_reduce(node_rank, init_method, rank, group_size, timeout_s), None)
        except (RuntimeError, ValueError) as error:
            report(members, num_bytes, None, str(error).splitlines()[0])


if __name__ == "__main__":
    main(sys.argv[1])
