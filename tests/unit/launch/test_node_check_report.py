"""A node's measurements of itself: GPUs as reported by nvidia-smi, and the handling of ranks that do not answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.device.node_check_ranks import NodeRank
from megafp8.launch import node_check
from megafp8.launch.node_check import GroupResult

H200 = "0, NVIDIA H200, 143771, 4, 0, Not Active\n1, NVIDIA H200, 143771, 70001, [N/A], Active\n"


def node_rank(nodes: tuple[str, ...] = ("localhost",), **change) -> NodeRank:
    fields = {"node": 0, "rank": 0, "ranks_per_node": 2, "port": 0, "store": "", "timeout_s": 0.1, "is_gpu": False}
    return NodeRank(nodes=nodes, **fields | change)


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{H200}'\n".replace("\n1,", "\\n1,").replace("Active\n'", "Active\\n'"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    first, second = node_check.gpu_states()
    assert (first.name, first.total_bytes, first.used_bytes) == ("NVIDIA H200", 143771 << 20, 4 << 20)
    assert [gpu.uncorrected_errors for gpu in (first, second)] == [0, 0]
    assert [gpu.is_slowed for gpu in (first, second)] == [False, True]


def test_without_nvidia_smi_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert node_check.gpu_states() == ()


def leave(scratch: Path, rank: int, *lines: dict) -> subprocess.Popen:
    """A rank that reported this and ended."""
    (scratch / f"rank{rank}").write_text("".join(json.dumps(line) + "\n" for line in lines))
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process


def said(members: list[int], seconds: float | None, error: str | None = None) -> dict:
    return {"members": members, "bytes": 1000, "seconds": seconds, "error": error}


def test_a_group_has_the_slowest_time_and_any_error(tmp_path: Path) -> None:
    ranks = [leave(tmp_path, 0, said([0], 1.0), said([0, 1], 1.0)),
             leave(tmp_path, 1, said([0], 4.0), said([0, 1], None, "reset"))]  # fmt: skip
    assert node_check.collect_results(node_rank(("a", "b")), tmp_path, ranks) == (
        GroupResult(members=(0,), bytes_per_s=250.0, error=None),
        GroupResult(members=(0, 1), bytes_per_s=None, error="rank 1: reset"),
    )


def test_a_rank_that_hangs_is_killed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_check, "STARTUP_TIMEOUT_S", 0.5)
    leave(tmp_path, 1, said([0], 1.0))
    ranks = [leave(tmp_path, 0, said([0], 1.0), said([0, 1], 1.0)), subprocess.Popen(["sleep", "60"])]
    (own, link) = node_check.collect_results(node_rank(("a", "b")), tmp_path, ranks)
    assert own.error is None and link.error == "rank 1: no result in time"
    assert all(process.poll() is not None for process in ranks)


def test_the_last_output_of_a_dead_rank_is_reported(tmp_path: Path) -> None:
    process = leave(tmp_path, 0, said([0], 1.0))
    dead = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    (tmp_path / "rank1").touch()
    (tmp_path / "errors1").write_text("Traceback\nImportError: no torch\n\n")
    (own,) = node_check.collect_results(node_rank(timeout_s=30.0), tmp_path, [process, dead])
    assert own.error == "rank 1: exited with status 7: ImportError: no torch"
