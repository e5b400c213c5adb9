"""The check of a node with GPUs: the output of nvidia-smi, and all-reduces by NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.ports import free_ports
from megafp8.launch.node_check import measure_node, read_report

pytestmark = [pytest.mark.gpu]
ROOT = Path(__file__).resolve().parents[2]


def test_a_node_is_measured(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    report = measure_node("localhost", ["localhost"], tmp_path, num_gpus=count, port=0, timeout_s=60)
    assert report.problems == () and len(report.gpus) == count
    assert all(gpu.total_bytes > gpu.used_bytes >= 0 and gpu.name.startswith("NVIDIA") for gpu in report.gpus)
    (group,) = report.groups
    assert group.error is None and (group.bytes_per_s or 0) > 1e9


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs, for two nodes")
def test_two_nodes_complete_an_all_reduce(tmp_path: Path) -> None:
    """Each node has one of two equal sets of this machine's GPUs."""
    nodes, half = ("localhost", "127.0.0.1"), torch.cuda.device_count() // 2
    words = [sys.executable, "launcher/check_nodes.py", "measure", str(tmp_path), "--gpus", str(half)]
    words += ["--port", str(free_ports(1)[0]), "--nodes", *nodes]
    started = []
    for number in range(len(nodes)):
        gpus = ",".join(map(str, range(number * half, (number + 1) * half)))
        environment = os.environ | {"SLURM_NODEID": str(number), "CUDA_VISIBLE_DEVICES": gpus}
        started.append(subprocess.Popen(words, cwd=ROOT, env=environment))
    assert [process.wait(300) for process in started] == [0, 0]
    for number, node in enumerate(nodes):
        report = read_report(tmp_path, node)
        assert report is not None
        assert [group.members for group in report.groups] == [(number,), (0, 1)]
        assert [group.error for group in report.groups] == [None, None] and report.rendezvous is None
