"""All-reduces among nodes of which one is missing. Processes on this machine stand in for the nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import signal
from pathlib import Path

import pytest

from benchmarks.ports import free_ports
from megafp8.device import all_reduce_check
from megafp8.device.node_check_ranks import NodeRank
from megafp8.launch.node_check import GroupResult, NodeReport, evaluate_nodes
from megafp8.utils.process import set_parent_death_signal

NUM_NODES, ABSENT = 4, 2


def be_node(node_rank: NodeRank, output: Path) -> None:
    """Entry point of a node's only rank."""
    set_parent_death_signal(signal.SIGKILL)
    with open(output, "w") as stream, contextlib.redirect_stdout(stream):
        all_reduce_check.main(json.dumps(dataclasses.asdict(node_rank)))


def report(node: int, output: Path) -> NodeReport:
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    groups = tuple(GroupResult(members=tuple(line["members"]), bytes_per_s=1.0, error=line["error"]) for line in lines)
    return NodeReport(node=f"n{node}", problems=(), software="", gpus=(), clock_s=0.0, groups=groups)


def test_only_the_missing_node_is_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours wait for it without success, and must then reach their other neighbours."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    port = free_ports(NUM_NODES + 1)[0]
    nodes = [node for node in range(NUM_NODES) if node != ABSENT]
    processes = []
    for node in nodes:
        node_rank = NodeRank(
            nodes=("127.0.0.1",) * NUM_NODES, node=node, rank=0, ranks_per_node=1, port=port,
            store=str(tmp_path / f"store{node}"), timeout_s=2.0, is_gpu=False,
        )  # fmt: skip
        process = multiprocessing.get_context("fork").Process(
            target=be_node, args=(node_rank, tmp_path / f"output{node}")
        )
        process.start()
        processes.append(process)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    reports = [report(node, tmp_path / f"output{node}") if node in nodes else None for node in range(NUM_NODES)]
    failed = {group.members for one in reports if one for group in one.groups if group.error}
    assert failed == {(1, 2), (2, 3)}
    assert list(evaluate_nodes([f"n{node}" for node in range(NUM_NODES)], reports)) == [f"n{ABSENT}"]
