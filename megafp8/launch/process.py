"""Which process wrote something, and whether it is still there. Linux: it reads /proc."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

ENDED = ("Z", "X", "x")
STOPPED = "T"
PR_SET_PDEATHSIG = 1
SLURM_JOB = "SLURM_JOB_ID"
# Each lets a run save and stop. SIGHUP is a terminal that was closed.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Process:
    """A process that no other one is taken for.

    Attributes:
        host: the machine's name, for people.
        place: this start of the machine and this space of process numbers: only there `pid` means something.
        started: ticks since the machine's start, as numbers are used again.
        job: of Slurm that it belongs to; None outside of Slurm.
    """

    host: str
    place: str
    pid: int
    started: int
    job: Optional[str] = None

    def state(self) -> Optional[str]:
        """The kernel's letter for it; `X` when it is gone, None when that cannot be seen from here."""
        if self.place != this_place():
            return None
        state, started = stat_of(self.pid) or ("X", self.started)
        return state if started == self.started else "X"

    def is_alive(self) -> Optional[bool]:
        """Whether it still runs (stopped ones do); None when that cannot be seen from here."""
        state = self.state()
        return None if state is None else state not in ENDED

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def this_process() -> Process:
    """The one that asks."""
    state_and_start = stat_of(os.getpid())
    started = state_and_start[1] if state_and_start else 0
    return Process(socket.gethostname(), this_place(), os.getpid(), started, os.environ.get(SLURM_JOB))


def heeded_stop_signals() -> tuple[signal.Signals, ...]:
    """The stop signals that this process should act on. `nohup` starts it with SIGHUP ignored, and it stays ignored."""
    has_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if number != signal.SIGHUP or not has_nohup)


def end_with_parent(number: int, parent: Optional[int] = None) -> None:
    """Have the kernel send this process a signal when the thread that started it ends, however it ends.

    Args:
        parent: number of the process that started this one, where it is known. The signal is sent at once if that
            process has ended before the kernel was asked.
    """
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_with_starter(number: int) -> None:
    """The same in a process of multiprocessing, which knows who started it."""
    starter = multiprocessing.parent_process()
    end_with_parent(number, None if starter is None else starter.pid)


@functools.cache
def this_place() -> str:
    """Another text after a reboot, on another machine and in another container."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def stat_of(pid: int) -> Optional[tuple[str, int]]:
    """State and start of a process of this place; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold anything
    return fields[0], int(fields[19])
