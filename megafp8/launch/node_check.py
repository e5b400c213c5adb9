"""Node check: what each node of a job measures about itself, and which nodes the job should not run on.

A node reports the doctor's results, its GPUs, its clock, the rendezvous, and all-reduces within the node and with its
neighbors (`device/node_check_ranks.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megafp8.device.node_check_ranks import NodeRank, link_members, node_links
from megafp8.launch.doctor.checks import ERROR, run_checks
from megafp8.launch.doctor.facts import Machine, command_output, find_machine
from megafp8.utils.files import UnreadableFile
from megafp8.utils.process import set_parent_death_signal
from megafp8.utils.strict_json import parse_json, read_json

GIB = 1 << 30
# Records and locks of a run are compared by their time stamps.
MAX_CLOCK_SKEW_S = 5.0
# Fraction of a GPU's memory that the driver and its services use.
IDLE_MEMORY_FRACTION = 0.05
# Time for the ranks to start: all import torch from one shared file system.
STARTUP_TIMEOUT_S = 120.0
# Timeout of each rendezvous and each all-reduce.
COLLECTIVE_TIMEOUT_S = 60.0
# A rank is in the group of its node and in two links.
MAX_GROUPS_PER_RANK = 3
# Time between the first node that has finished its check and the last, including the doctor's.
NODE_CHECK_TIMEOUT_S = round(STARTUP_TIMEOUT_S + 2 * COLLECTIVE_TIMEOUT_S * MAX_GROUPS_PER_RANK + 120)


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """The state of a GPU according to nvidia-smi, before the job's own processes start.

    Attributes:
        uncorrected_errors: uncorrected memory errors since the driver was loaded.
        is_slowed: whether the hardware throttles the clock, because of heat or power.
    """

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    uncorrected_errors: int
    is_slowed: bool


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """The result of an all-reduce among the ranks of one node, or of two neighbors.

    Attributes:
        members: indices of the nodes.
        error: why it failed on a rank of this node; None if it succeeded.
    """

    members: tuple[int, ...]
    bytes_per_s: Optional[float]
    error: Optional[str]


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """The report of one node.

    Attributes:
        problems: errors that the doctor found.
        software: versions of driver and libraries.
        clock_s: offset of the node's clock to the file server's, positive if ahead.
        rendezvous: why the rendezvous of all nodes failed; None if it succeeded, or there is only one node.
    """

    node: str
    problems: tuple[str, ...]
    software: str
    gpus: tuple[GpuState, ...]
    clock_s: float
    groups: tuple[GroupResult, ...]
    rendezvous: Optional[str] = None


def clock_offset_s(path: Path) -> float:
    """Offset of this machine's clock to that of the file server, which sets a file's time stamp."""
    before = time.time()
    path.touch()
    os.utime(path)
    after = time.time()
    return (before + after) / 2 - path.stat().st_mtime


def write_report(folder: Path, report: NodeReport) -> None:
    """Write a report to the job's folder atomically."""
    path = folder / f"{report.node}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n", encoding="utf-8")
    os.replace(draft, path)


def read_report(folder: Path, node: str) -> Optional[NodeReport]:
    """The report of a node; None if there is none, or it cannot be read."""
    try:
        plain = read_json(folder / f"{node}.json")
        return NodeReport(**plain | {
            "problems": tuple(plain["problems"]),
            "gpus": tuple(GpuState(**gpu) for gpu in plain["gpus"]),
            "groups": tuple(GroupResult(**group | {"members": tuple(group["members"])}) for group in plain["groups"]),
        })  # fmt: skip
    except (UnreadableFile, TypeError, KeyError):
        return None


def evaluate_nodes(nodes: Sequence[str], reports: Sequence[Optional[NodeReport]]) -> dict[str, list[str]]:
    """Problems of each node that the job should not run on.

    Args:
        nodes: all nodes of the job, in its order.
        reports: the reports of these nodes; None for a missing one.
    """
    wrong: dict[str, list[str]] = {node: [] for node in nodes}
    present = [report for report in reports if report is not None]
    for node, report in zip(nodes, reports, strict=True):
        if report is None:
            wrong[node].append("no report in time")
            continue
        wrong[node] += [*report.problems, *gpu_problems(report)]
        local_errors = [group.error for group in report.groups if len(group.members) == 1 and group.error]
        wrong[node] += [f"all-reduce within the node: {error}" for error in local_errors]
    if present:
        usual_s = statistics.median(report.clock_s for report in present)
        usual_software = statistics.mode(report.software for report in present)
        for report in present:
            if report.software != usual_software:
                wrong[report.node].append(f"its software is {report.software}; most nodes have {usual_software}")
            ahead_s = report.clock_s - usual_s
            if abs(ahead_s) > MAX_CLOCK_SKEW_S:
                direction = "ahead of" if ahead_s > 0 else "behind"
                wrong[report.node].append(f"its clock is {abs(ahead_s):.1f} s {direction} the others'")
    blame_failed_links(nodes, reports, wrong)
    if not any(wrong.values()):  # otherwise the known problems explain a failed rendezvous
        for report in present:
            wrong[report.node] += [f"rendezvous: {report.rendezvous}"] if report.rendezvous else []
    return {node: problems for node, problems in wrong.items() if problems}


def gpu_problems(report: NodeReport) -> list[str]:
    """Problems of the node's GPUs. Only these are certain to be specific to the node, because files are shared."""
    problems: list[str] = []
    for gpu in report.gpus:
        if gpu.used_bytes > IDLE_MEMORY_FRACTION * gpu.total_bytes:
            problems.append(
                f"GPU {gpu.index}: {gpu.used_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB are in use by other "
                "processes"
            )
        if gpu.uncorrected_errors:
            problems.append(f"GPU {gpu.index}: {gpu.uncorrected_errors} uncorrected memory errors")
        if gpu.is_slowed:
            problems.append(f"GPU {gpu.index}: its clock is throttled by the hardware")
    return problems


def blame_failed_links(
    nodes: Sequence[str], reports: Sequence[Optional[NodeReport]], wrong: dict[str, list[str]]
) -> None:
    """Add failed all-reduces between nodes to `wrong`, under the node that is responsible.

    This is a node none of whose links works, or else the second node of a link.
    """
    links: dict[tuple[int, ...], Optional[str]] = {}
    for group in (group for report in reports if report for group in report.groups if len(group.members) == 2):
        links[group.members] = links.get(group.members) or group.error  # either node may have seen the failure
    lost = {
        number for number in range(len(nodes))
        if (own := [error for members, error in links.items() if number in members]) and all(own)
    }  # fmt: skip
    for members, error in links.items():
        if error is None or any(wrong[nodes[member]] for member in members):
            continue  # it succeeded, or known problems explain it
        for member in [member for member in members if member in lost] or [members[1]]:
            (other,) = {*members} - {member}
            wrong[nodes[member]].append(f"all-reduce with {nodes[other]}: {error}")


def healthy_summary(nodes: Sequence[str], reports: Sequence[Optional[NodeReport]]) -> str:
    """One line on nodes without problems."""
    present = [report for report in reports if report is not None]
    speeds = sorted(
        (group.bytes_per_s / 1e9, "-".join(nodes[member] for member in group.members))
        for report in present for group in report.groups if group.bytes_per_s
    )  # fmt: skip
    clocks = [report.clock_s for report in present]
    gpus = f", {len(present[0].gpus)} x {present[0].gpus[0].name} each" if present and present[0].gpus else ""
    slowest = f", slowest all-reduce {speeds[0][0]:.2f} GB/s ({speeds[0][1]})" if speeds else ""
    return f"{len(present)} nodes passed{gpus}{slowest}, clocks within {max(clocks) - min(clocks):.1f} s"


NVIDIA_SMI_QUERY = (
    "index,name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown"
)
PACKAGES = ("torch", "megatron-core", "transformer-engine", "triton")
MIB = 1 << 20
NO_ANSWER = "no result in time"


def measure_node(
    node: str,
    nodes: Sequence[str],
    folder: Path,
    *,
    num_gpus: int,
    port: int,
    timeout_s: float,
    addresses: Sequence[str] = (),
) -> NodeReport:
    """Check this node and return its report.

    Args:
        nodes: all nodes of the job, in its order; `node` is this one.
        folder: the job's folder for reports, which all nodes share.
        port: the first of `NUM_CHECK_PORTS` ports to use.
        timeout_s: for each rendezvous and each all-reduce.
        addresses: addresses of the nodes; default: their names.
    """
    gpus = gpu_states()
    clock = folder / f"{node}.clock"
    clock_s = clock_offset_s(clock)
    clock.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        node_rank = NodeRank(
            nodes=tuple(addresses or nodes), node=list(nodes).index(node), rank=0, ranks_per_node=max(1, num_gpus),
            port=port, store=f"{scratch}/store", timeout_s=timeout_s, is_gpu=num_gpus > 0,
        )  # fmt: skip
        ranks = [
            start_check_process("all_reduce_check", dataclasses.replace(node_rank, rank=rank), Path(scratch), str(rank))
            for rank in range(node_rank.ranks_per_node)
        ]
        rendezvous_check = None
        if len(nodes) > 1:
            rendezvous_check = start_check_process("rendezvous_check", node_rank, Path(scratch), "rendezvous")
        machine = find_machine(str(folder))
        results = run_checks(machine, num_gpus)
        groups = collect_results(node_rank, Path(scratch), ranks)
        rendezvous = None
        if rendezvous_check is not None:
            rendezvous = rendezvous_error(rendezvous_check, node_rank.timeout_s, Path(scratch))
    problems = tuple(f"{result.check}: {result.text}" for result in results if result.level == ERROR)
    return NodeReport(
        node=node, problems=problems, software=software_versions(machine), gpus=gpus, clock_s=clock_s, groups=groups,
        rendezvous=rendezvous,
    )  # fmt: skip


def software_versions(machine: Machine) -> str:
    """Versions that must be the same on all nodes."""
    packages = (f"{name} {machine.packages[name]}" for name in PACKAGES if name in machine.packages)
    driver = [f"driver {machine.driver}"] if machine.driver else []
    return ", ".join([*driver, "Python " + ".".join(map(str, machine.python)), *packages])


def gpu_states() -> tuple[GpuState, ...]:
    """The state of all GPUs according to nvidia-smi; empty without it."""
    text = command_output("nvidia-smi", f"--query-gpu={NVIDIA_SMI_QUERY}", "--format=csv,noheader,nounits") or ""
    rows = (line.split(", ") for line in text.splitlines())
    return tuple(
        GpuState(
            index=int(index), name=name, total_bytes=int(total) * MIB, used_bytes=int(used) * MIB,
            uncorrected_errors=int(errors) if errors.isdigit() else 0,  # [N/A] where there is no ECC
            is_slowed=slowed == "Active",
        )
        for index, name, total, used, errors, slowed in rows
    )  # fmt: skip


def start_check_process(module: str, node_rank: NodeRank, scratch: Path, name: str) -> subprocess.Popen:
    """Start a module of `megafp8.device` that ends with this process and writes to `rankNAME` and `errorsNAME`."""
    with open(scratch / f"rank{name}", "w") as output, open(scratch / f"errors{name}", "w") as errors:
        command = [sys.executable, "-m", f"megafp8.device.{module}", json.dumps(dataclasses.asdict(node_rank))]
        end = functools.partial(set_parent_death_signal, signal.SIGKILL, os.getpid())
        return subprocess.Popen(command, stdout=output, stderr=errors, preexec_fn=end)


def rendezvous_error(process: subprocess.Popen, wait_s: float, scratch: Path) -> str | None:
    """Why the rendezvous of all nodes failed; None if it succeeded.

    Args:
        wait_s: time to wait after the end of the all-reduces, which started at the same time.
    """
    end = wait_or_kill(process, wait_s, scratch / "errorsrendezvous")
    return end if end == NO_ANSWER or process.returncode else None


def wait_or_kill(process: subprocess.Popen, wait_s: float, errors: Path) -> str:
    """Wait for a process, kill it when the time is over, and return how it ended."""
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return NO_ANSWER
    return f"exited with status {process.returncode}{last_error_line(errors)}"


def collect_results(node_rank: NodeRank, scratch: Path, ranks: Sequence[subprocess.Popen]) -> tuple[GroupResult, ...]:
    """Wait for the node's ranks, and return the result of each group: that of its slowest rank."""
    num_nodes = len(node_rank.nodes)
    expected = [(node_rank.node,), *(link_members(link, num_nodes) for link in node_links(node_rank.node, num_nodes))]
    deadline = time.monotonic() + STARTUP_TIMEOUT_S + 2 * node_rank.timeout_s * len(expected)  # of all ranks together
    lines: list[dict[tuple[int, ...], dict]] = []
    ends: list[str] = []
    for rank, process in enumerate(ranks):
        ends.append(wait_or_kill(process, max(0.0, deadline - time.monotonic()), scratch / f"errors{rank}"))
        parsed = map(parse_json, (scratch / f"rank{rank}").read_text().splitlines())
        lines.append({tuple(line["members"]): line for line in parsed})
    return tuple(combine_ranks(members, [each.get(members) for each in lines], ends) for members in expected)


def last_error_line(path: Path) -> str:
    """The last line that a rank wrote to standard error, after a colon; empty without one."""
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


def combine_ranks(members: tuple[int, ...], lines: Sequence[dict | None], ends: Sequence[str]) -> GroupResult:
    """Combine the results of this node's ranks. `ends` has the reason for each rank without a result."""
    errors = [f"rank {rank}: {ends[rank] if line is None else line['error']}"
              for rank, line in enumerate(lines) if line is None or line["error"]]  # fmt: skip
    if errors:
        return GroupResult(members=members, bytes_per_s=None, error=errors[0])
    speed = min(line["bytes"] / line["seconds"] for line in lines if line)
    return GroupResult(members=members, bytes_per_s=speed, error=None)
