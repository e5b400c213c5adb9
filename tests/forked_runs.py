"""`pretrain_gpt.py` on forked ranks that may be killed: the real command, without the seconds of its imports.

`ranks.py` is for functions that return a result. Here ranks exit with a status, and the test inspects their files.
A test process that starts them imports everything first (`prepare`), and joins no process group itself.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Optional

import psutil
from ranks import become_rank, join_gloo

from megafp8.config.flag_parser import cached_parser
from megafp8.mcore import cpu_patches
from megafp8.resilience import fault_injection
from megafp8.utils.process import ENDED_STATES, read_proc_stat

ROOT = Path(__file__).resolve().parents[1]
HUNG = 124
# For the system to end the children of a rank that was killed.
PATIENCE_S = 5.0
# Those of the command, which are megatron-core's, and those of forked runs.
ALL_MOCK_DOCUMENTS, NUM_MOCK_DOCUMENTS = 100_000, 1000


@dataclass(frozen=True)
class Ended:
    """How a start of a run ended.

    Attributes:
        statuses: exit status of each rank, by rank; below zero: the signal that killed it; `HUNG` if the test killed
        it.
        seconds: from the start to the end of the last rank.
        seconds_after_first: from the end of the first rank to that of the last.
        num_orphans: processes of ranks that outlived them.
        output: what each rank wrote to standard output and error, by rank.
    """

    statuses: tuple[int, ...]
    seconds: float
    seconds_after_first: float
    num_orphans: int
    output: tuple[str, ...]

    def report(self) -> str:
        """The message of a failed assertion."""
        ends = (f"rank {rank}: {text[-2000:]}" for rank, text in enumerate(self.output))
        return f"statuses {self.statuses}\n" + "\n".join(ends)


def prepare() -> None:
    """Import and build everything that the ranks need in this process, and make the mock documents few.

    The order of megatron-core's 100,000 documents costs every rank a second in samples of 16 tokens.
    """
    cpu_patches.install()
    for name in ("megafp8.cli.pretrain", "megafp8.training.pretrain", "megafp8.training.checks"):
        importlib.import_module(name)
    # Kept for the ranks, of which each would do it.
    cached_parser()
    from megafp8.training.run_record import library_versions

    library_versions()
    set_mock_documents(NUM_MOCK_DOCUMENTS)


def set_mock_documents(number: int) -> None:
    """Give megatron-core's mock dataset this many documents, in this process and in those forked from it."""
    datasets = importlib.import_module("megatron.core.datasets.gpt_dataset")
    datasets.MockGPTLowLevelDataset.size = number


@contextlib.contextmanager
def all_mock_documents() -> Iterator[None]:
    """Forked runs within have the mock documents of the command."""
    set_mock_documents(ALL_MOCK_DOCUMENTS)
    try:
        yield
    finally:
        set_mock_documents(NUM_MOCK_DOCUMENTS)


def run_forked(
    world_size: int,
    flags: str | Sequence[str],
    plan: str = "",
    fired: Optional[Path] = None,
    timeout_s: float = 60.0,
) -> Ended:
    """Run the command with these flags on this many gloo ranks until all have ended.

    Args:
        flags: the words of the command line, or one text without quotes.
        plan: of faults (`megafp8/resilience/fault_injection.py`).
        fired: folder that records the faults which have been triggered.
        timeout_s: seconds after which the ranks are killed and reported as `HUNG`.
    """
    with started(world_size, flags, plan, fired) as run:
        return run.wait(timeout_s)


@contextlib.contextmanager
def started(
    world_size: int, flags: str | Sequence[str], plan: str = "", fired: Optional[Path] = None
) -> Iterator[ForkedRun]:
    """The ranks of one start of a run. Neither they nor their children outlive the block."""
    with tempfile.TemporaryDirectory(prefix="run_") as name:
        run = ForkedRun(world_size, flags, plan, fired, Path(name))
        try:
            yield run
        finally:
            run.kill()


class ForkedRun:
    """The ranks of one start.

    Args:
        environment: more variables for the ranks; with MASTER_ADDR they meet there, else in `folder`.

    Attributes:
        processes: by rank.
    """

    def __init__(
        self, world_size: int, flags: str | Sequence[str], plan: str, fired: Optional[Path], folder: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
    ):  # fmt: skip
        words = flags.split() if isinstance(flags, str) else list(flags)
        self._folder, self._began, self._ends = folder, time.monotonic(), dict[int, float]()
        variables = {fault_injection.FAULTS_VARIABLE: plan, **environment} | (
            {fault_injection.FIRED_VARIABLE: str(fired)} if fired else {}
        )
        fork = multiprocessing.get_context("fork").Process
        self.processes: list[BaseProcess] = [
            fork(target=be_command, args=(rank, world_size, folder, words, variables)) for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def wait(self, timeout_s: float, grace_s: float = math.inf) -> Ended:
        """Wait until all ranks have ended, and kill them at the timeout.

        Args:
            grace_s: seconds that the others have after one has failed.
        """
        deadline, hung = self._began + timeout_s, set[int]()
        while len(self._ends) < len(self.processes):
            ended = self.poll(max(0.0, deadline - time.monotonic()))
            if any(self.processes[rank].exitcode for rank in ended):
                deadline = min(deadline, self._ends[ended[0]] + grace_s)
            if not ended:
                hung = set(range(len(self.processes))) - set(self._ends)
                self.kill()
                self._ends |= dict.fromkeys(hung, time.monotonic())
        for process in self.processes:
            process.join()
        return Ended(
            statuses=tuple(
                HUNG if rank in hung else process.exitcode or 0 for rank, process in enumerate(self.processes)
            ),
            seconds=max(self._ends.values()) - self._began,
            seconds_after_first=max(self._ends.values()) - min(self._ends.values()),
            num_orphans=sum(is_group_alive(process.pid) for process in self.processes),
            output=tuple(self.output(rank) for rank in range(len(self.processes))),
        )

    def poll(self, timeout_s: float = 0.0) -> list[int]:
        """The ranks that have ended since the last call; waits at most this long for the next of them."""
        waiting = {p.sentinel: rank for rank, p in enumerate(self.processes) if rank not in self._ends}
        ended = [waiting[sentinel] for sentinel in wait(list(waiting), timeout_s)]
        for rank in ended:
            self._ends[rank] = time.monotonic()
            self.processes[rank].join()
        return ended

    def is_over(self, timeout_s: float) -> bool:
        """Whether all ranks have ended, or had this time to. Then `wait` returns immediately."""
        self.poll()
        return len(self._ends) == len(self.processes) or time.monotonic() > self._began + timeout_s

    def output(self, rank: int) -> str:
        """What a rank has written so far."""
        path = self._folder / f"output{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self) -> None:
        """Kill every rank and its children."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.is_alive():
                process.kill()
            process.join()


def is_group_alive(group: Optional[int]) -> bool:
    """Whether any process of a process group is left, a moment after its leader has ended.

    A process that has ended stays a zombie until the process that inherited it asks for its status.
    """
    deadline = time.monotonic() + PATIENCE_S
    while any(members(group)):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return False


def members(group: Optional[int]) -> list[int]:
    """The processes of a process group that have not ended."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):  # it may end between two polls
            if os.getpgid(pid) == group and (read_proc_stat(pid) or ENDED_STATES)[0] not in ENDED_STATES:
                found.append(pid)
    return found


def be_command(rank: int, world_size: int, folder: Path, flags: Optional[list[str]], variables: dict[str, str]) -> None:
    """Entry point of a rank: the command, and its exit status. Without flags: those of the process."""
    output = open(folder / f"output{rank}", "a", buffering=1)  # noqa: SIM115, for as long as the process lives
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    sys.stdout = sys.stderr = output  # pytest has put its own files there
    become_rank(rank, world_size, folder)
    os.environ |= variables
    importlib.reload(fault_injection)
    if "MASTER_ADDR" not in variables:  # with an address the command joins the group itself, as under torchrun
        join_gloo(rank, world_size, folder)
    command = importlib.import_module("megafp8.cli.pretrain")
    sys.exit(command.main(flags))
