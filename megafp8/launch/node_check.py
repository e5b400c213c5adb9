"""What the nodes of a job found out about themselves, and which of them it should not run on.

For all-reduces the nodes form a ring in which each link is a group of its own, so that what fails can be named: a bad
node fails in both of its links, and its neighbours' other links work. Links without a common node run at a time.

Look at one node of a job: what the doctor says, its GPUs, its clock, and all-reduces with its neighbours.
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

from megafp8.launch.doctor.checks import examine
from megafp8.launch.doctor.facts import Machine, find_machine, output_of
from megafp8.launch.doctor.findings import ERROR
from megafp8.utils.files import UnreadableFile
from megafp8.utils.process import end_with_parent
from megafp8.utils.strict_json import parse_json, read_json

GIB = 1 << 30
# Records and locks of one run are compared by their times.
CLOCK_S = 5.0
# Of a GPU's memory, with nothing on it: the driver and its services.
IDLE_MEMORY_FRACTION = 0.05
# Of the rendezvous and of the links. Neighbours on one machine, as in tests, must not have the same one.
PORTS = 100
# For the ranks to start: they import torch, all from one file system.
START_S = 120.0
# For each meeting and each all-reduce.
TIMEOUT_S = 60.0
# A node's ranks are in a group of their own and in two links.
MOST_GROUPS = 3
# Between the first node that has looked at itself and the last: the doctor there takes its time, too.
NODE_CHECK_TIMEOUT_S = round(START_S + 2 * TIMEOUT_S * MOST_GROUPS + 120)


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """A GPU as nvidia-smi sees it before the job's own processes are there.

    Attributes:
        uncorrected_errors: of its memory, since the driver was loaded.
        is_slowed: the hardware slows it down, for heat or power.
    """

    index: int
    name: str
    total_bytes: int
    used_bytes: int
    uncorrected_errors: int
    is_slowed: bool


@dataclass(frozen=True, kw_only=True)
class NodeRank:
    """Where a rank of the all-reduces is.

    Attributes:
        nodes: addresses of all nodes, in one order everywhere.
        node, rank: this rank's node, and its number in it.
        ranks_per_node: one a GPU; one without GPUs.
        port: of the rendezvous of all nodes; links meet on those after it.
        store: file for the ranks of this node to meet, on its own disk.
        timeout_s: for each meeting and each all-reduce.
    """

    nodes: tuple[str, ...]
    node: int
    rank: int
    ranks_per_node: int
    port: int
    store: str
    timeout_s: float
    is_gpu: bool


def links_of(node: int, num_nodes: int) -> list[int]:
    """The links of a node in the order in which all nodes go through theirs; link i joins nodes i and i + 1."""
    num_links = num_nodes if num_nodes > 2 else num_nodes - 1
    mine = {(node - 1) % num_nodes, node} & {*range(num_links)}
    # Even ones, odd ones, and the last of an odd ring, which has a node in common with links of both kinds.
    return sorted(mine, key=lambda link: 2 if link == num_nodes - 1 and num_nodes % 2 else link % 2)


def members_of(link: int, num_nodes: int) -> tuple[int, int]:
    """The numbers of the nodes that a link joins."""
    return link, (link + 1) % num_nodes


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """An all-reduce among the GPUs (or CPUs) of one node, or of two neighbours.

    Attributes:
        members: the nodes' numbers in the job.
        error: why it failed on some rank of this node; None when it did not.
    """

    members: tuple[int, ...]
    bytes_per_s: Optional[float]
    error: Optional[str]


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """One node.

    Attributes:
        problems: what the doctor found there that keeps a run from starting.
        software: versions of driver and libraries.
        clock_s: its clock, ahead of the one that stamps files in the job's folder.
        rendezvous: why it did not meet all nodes as torchrun does; None when it did, or is the only one.
    """

    node: str
    problems: tuple[str, ...]
    software: str
    gpus: tuple[GpuState, ...]
    clock_s: float
    groups: tuple[GroupResult, ...]
    rendezvous: Optional[str] = None

    def to_plain(self) -> dict:
        """As it stands in its file."""
        return dataclasses.asdict(self)


def clock_ahead_s(path: Path) -> float:
    """How far this machine's clock is ahead of the file server's, which stamps a file now."""
    before = time.time()
    path.touch()
    os.utime(path)
    after = time.time()
    return (before + after) / 2 - path.stat().st_mtime


def write_report(folder: Path, report: NodeReport) -> None:
    """Leave it where the judge looks, whole or not at all."""
    path = folder / f"{report.node}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(report.to_plain(), indent=2) + "\n", encoding="utf-8")
    os.replace(draft, path)


def read_report(folder: Path, node: str) -> Optional[NodeReport]:
    """What a node left; None when it left nothing that can be read."""
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
    """What is wrong with each node that a job should not run on.

    Args:
        nodes: of the job, in its order.
        reports: theirs; None where there is none.
    """
    wrong: dict[str, list[str]] = {node: [] for node in nodes}
    present = [report for report in reports if report is not None]
    for node, report in zip(nodes, reports, strict=True):
        wrong[node] += ["it gave no report in time"] if report is None else local_problems(report)
    if present:
        usual_s = statistics.median(report.clock_s for report in present)
        usual_software = statistics.mode(report.software for report in present)
        for report in present:
            if report.software != usual_software:
                wrong[report.node].append(f"it has {report.software}; most nodes have {usual_software}")
            ahead_s = report.clock_s - usual_s
            if abs(ahead_s) > CLOCK_S:
                direction = "ahead of" if ahead_s > 0 else "behind"
                wrong[report.node].append(f"its clock is {abs(ahead_s):.1f} s {direction} the others'")
    blame_links(nodes, reports, wrong)
    if not any(wrong.values()):  # else what is known explains it
        for report in present:
            wrong[report.node] += [f"rendezvous: {report.rendezvous}"] if report.rendezvous else []
    return {node: problems for node, problems in wrong.items() if problems}


def local_problems(report: NodeReport) -> list[str]:
    """What a node's report says against it."""
    own = [group for group in report.groups if len(group.members) == 1]
    return [
        *report.problems, *gpu_problems(report),
        *(f"all-reduce within the node: {group.error}" for group in own if group.error),
    ]  # fmt: skip


def gpu_problems(report: NodeReport) -> list[str]:
    """What belongs to this node and no other: its GPUs. The rest may be wrong with every node, as files are shared."""
    problems: list[str] = []
    for gpu in report.gpus:
        if gpu.used_bytes > IDLE_MEMORY_FRACTION * gpu.total_bytes:
            problems.append(
                f"GPU {gpu.index}: {gpu.used_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB are in use by others"
            )
        if gpu.uncorrected_errors:
            problems.append(f"GPU {gpu.index}: {gpu.uncorrected_errors} uncorrected errors of its memory")
        if gpu.is_slowed:
            problems.append(f"GPU {gpu.index}: its clock is held down by the hardware")
    return problems


def blame_links(nodes: Sequence[str], reports: Sequence[Optional[NodeReport]], wrong: dict[str, list[str]]) -> None:
    """Add to `wrong` who is to blame for all-reduces between nodes that failed: a node none of whose links works, else
    the second of two that do not reach each other."""
    links: dict[tuple[int, ...], Optional[str]] = {}
    for group in (group for report in reports if report for group in report.groups if len(group.members) == 2):
        links[group.members] = links.get(group.members) or group.error  # either end may have seen it fail
    lost = {
        number for number in range(len(nodes))
        if (own := [error for members, error in links.items() if number in members]) and all(own)
    }  # fmt: skip
    for members, error in links.items():
        if error is None or any(wrong[nodes[member]] for member in members):
            continue  # it works, or what is known explains it
        for member in [member for member in members if member in lost] or [members[1]]:
            (other,) = {*members} - {member}
            wrong[nodes[member]].append(f"all-reduce with {nodes[other]}: {error}")


def summary(nodes: Sequence[str], reports: Sequence[Optional[NodeReport]]) -> str:
    """One line on nodes that are all well."""
    present = [report for report in reports if report is not None]
    speeds = sorted(
        (group.bytes_per_s / 1e9, "-".join(nodes[member] for member in group.members))
        for report in present for group in report.groups if group.bytes_per_s
    )  # fmt: skip
    clocks = [report.clock_s for report in present]
    gpus = f", {len(present[0].gpus)} x {present[0].gpus[0].name} each" if present and present[0].gpus else ""
    slowest = f", slowest all-reduce {speeds[0][0]:.2f} GB/s ({speeds[0][1]})" if speeds else ""
    return f"{len(present)} nodes are well{gpus}{slowest}, clocks within {max(clocks) - min(clocks):.1f} s"


QUERY = "index,name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown"
PACKAGES = ("torch", "megatron-core", "transformer-engine", "triton")
MIB = 1 << 20


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
        place = NodeRank(
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


def start_ranks(place: NodeRank, scratch: Path) -> list[subprocess.Popen]:
    """Start the node's ranks of the all-reduces."""
    return [
        start_check("all_reduce_check", dataclasses.replace(place, rank=rank), scratch, str(rank))
        for rank in range(place.ranks_per_node)
    ]


def start_check(module: str, place: NodeRank, scratch: Path, name: str) -> subprocess.Popen:
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


def results(place: NodeRank, scratch: Path, ranks: Sequence[subprocess.Popen]) -> tuple[GroupResult, ...]:
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
