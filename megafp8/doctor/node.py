"""Look at one node of a job: what the doctor says, its GPUs, its clock, and all-reduces with its neighbours."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megafp8.doctor.checks import examine
from megafp8.doctor.finding import ERROR
from megafp8.doctor.machine import Machine
from megafp8.doctor.probes import find_machine, output_of
from megafp8.launch.nodes import (
    START_S,
    GpuState,
    GroupResult,
    NodeReport,
    Place,
    clock_ahead_s,
    links_of,
    members_of,
)
from megafp8.launch.process import end_with_parent
from megafp8.utils.strict_json import parse_json

QUERY = "index,name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown"
PACKAGES = ("torch", "megatron-core", "transformer-engine", "triton")
MIB = 1 << 20


def measure_node(
    node: str, nodes: Sequence[str], folder: Path, *, num_gpus: int, port: int, timeout_s: float,
    addresses: Sequence[str] = (),
) -> NodeReport:
    """One node's report.

    Args:
        nodes: all of the job, in its order; `node` is this one.
        folder: the job's, which all nodes see.
        port: the first of those on which nodes meet.
        timeout_s: for each meeting and each all-reduce.
        addresses: where the nodes are reached; default their names.
    """
    gpus = gpu_states()
    clock = folder / f"{node}.clock"
    clock_s = clock_ahead_s(clock)
    clock.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        place = Place(
            nodes=tuple(addresses or nodes), node=list(nodes).index(node), rank=0, ranks_per_node=max(1, num_gpus),
            port=port, store=f"{scratch}/store", timeout_s=timeout_s, is_gpu=num_gpus > 0,
        )  # fmt: skip
        ranks = start_ranks(place, Path(scratch))
        meeting = start_check("rendezvous_check", place, Path(scratch), "rendezvous") if len(nodes) > 1 else None
        machine = find_machine(str(folder))
        findings = examine(machine, num_gpus)
        groups = results(place, Path(scratch), ranks)
        rendezvous = None if meeting is None else rendezvous_error(meeting, place.timeout_s, Path(scratch))
    problems = tuple(f"{finding.check}: {finding.text}" for finding in findings if finding.level == ERROR)
    return NodeReport(
        node=node, problems=problems, software=software(machine), gpus=gpus, clock_s=clock_s, groups=groups,
        rendezvous=rendezvous,
    )  # fmt: skip


def software(machine: Machine) -> str:
    """What has to be the same on all nodes."""
    packages = (f"{name} {machine.packages[name]}" for name in PACKAGES if name in machine.packages)
    driver = [f"driver {machine.driver}"] if machine.driver else []
    return ", ".join([*driver, "Python " + ".".join(map(str, machine.python)), *packages])


def gpu_states() -> tuple[GpuState, ...]:
    """The GPUs by nvidia-smi; none without it."""
    text = output_of("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits") or ""
    rows = (line.split(", ") for line in text.splitlines())
    return tuple(
        GpuState(
            index=int(index), name=name, total_bytes=int(total) * MIB, used_bytes=int(used) * MIB,
            uncorrected_errors=int(errors) if errors.isdigit() else 0,  # [N/A] where there is no ECC
            is_slowed=slowed == "Active",
        )
        for index, name, total, used, errors, slowed in rows
    )  # fmt: skip


def start_ranks(place: Place, scratch: Path) -> list[subprocess.Popen]:
    """Start the node's ranks of the all-reduces."""
    return [
        start_check("all_reduce_check", dataclasses.replace(place, rank=rank), scratch, str(rank))
        for rank in range(place.ranks_per_node)
    ]


def start_check(module: str, place: Place, scratch: Path, name: str) -> subprocess.Popen:
    """Start a module of `megafp8.device`, which ends with this process and writes to `rankNAME` and `errorsNAME`."""
    with open(scratch / f"rank{name}", "w") as told, open(scratch / f"errors{name}", "w") as said:
        command = [sys.executable, "-m", f"megafp8.device.{module}", json.dumps(dataclasses.asdict(place))]
        end = functools.partial(end_with_parent, signal.SIGKILL, os.getpid())
        return subprocess.Popen(command, stdout=told, stderr=said, preexec_fn=end)


def rendezvous_error(process: subprocess.Popen, wait_s: float, scratch: Path) -> str | None:
    """Why the rendezvous of all nodes failed; None when it did not.

    Args:
        wait_s: beyond the end of the all-reduces, which started with it.
    """
    try:
        status = process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "no answer in time"
    return f"ended with status {status}{last_words(scratch / 'errorsrendezvous')}" if status else None


def results(place: Place, scratch: Path, ranks: Sequence[subprocess.Popen]) -> tuple[GroupResult, ...]:
    """What the node's ranks found, when they have ended or their time is over; the slowest of a group counts."""
    num_nodes = len(place.nodes)
    expected = [(place.node,), *(members_of(link, num_nodes) for link in links_of(place.node, num_nodes))]
    deadline_s = START_S + 2 * place.timeout_s * len(expected)
    told: list[dict[tuple[int, ...], dict]] = []
    silences: list[str] = []
    for rank, process in enumerate(ranks):
        try:
            process.wait(deadline_s)
            silences.append(f"ended with status {process.returncode}{last_words(scratch / f'errors{rank}')}")
        except subprocess.TimeoutExpired:
            deadline_s = 0.0
            process.kill()
            process.wait()
            silences.append("no answer in time")
        lines = map(parse_json, (scratch / f"rank{rank}").read_text().splitlines())
        told.append({tuple(line["members"]): line for line in lines})
    return tuple(combined(members, [lines.get(members) for lines in told], silences) for members in expected)


def last_words(path: Path) -> str:
    """The last line of what a rank wrote to standard error, after a colon; empty without one."""
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


def combined(members: tuple[int, ...], lines: Sequence[dict | None], silences: Sequence[str]) -> GroupResult:
    """One result of those of all ranks of this node; `silences` say why a rank has none."""
    errors = [f"rank {rank}: {silences[rank] if line is None else line['error']}"
              for rank, line in enumerate(lines) if line is None or line["error"]]  # fmt: skip
    if errors:
        return GroupResult(members=members, bytes_per_s=None, error=errors[0])
    speed = min(line["bytes"] / line["seconds"] for line in lines if line)
    return GroupResult(members=members, bytes_per_s=speed, error=None)
