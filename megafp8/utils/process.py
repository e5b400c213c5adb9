"""Which process wrote something, and whether it is still there. Linux: it reads /proc.

Work beside the training loop.

A rank ends when the torchrun that started it ends, however it does and however early.

Standard library only: a rank calls this before its imports, which take seconds, and minutes on a busy file system.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, TypeVar

from megafp8.errors import PeerLost

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


T = TypeVar("T")


def in_thread(action: Callable[..., T], *arguments: Any) -> Future[T]:
    """Start an action in a thread of its own; its result.

    A thread that hangs (a disk that does not answer) is left behind: unlike a pool's it keeps no program from ending.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(action(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name=f"megafp8-{getattr(action, '__name__', 'work')}").start()
    return future


# For a connection within this machine.
CONNECT_S = 5.0


def is_under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_torchrun() -> None:
    """Have the kernel kill this process when torchrun ends, and end it now if torchrun has ended already.

    SIGKILL, since a rank that has not met the others has nothing to save; `save_at_end_of_torchrun` is for afterwards.
    The kernel watches the thread that started this process, which in torchrun is the main one.
    """
    if not is_under_torchrun():
        return
    end_with_parent(signal.SIGKILL)
    if is_torchrun_gone():
        print("torchrun, which started this rank, is gone: the rank ends too", file=sys.stderr, flush=True)
        sys.exit(PeerLost.exit_status)


def save_at_end_of_torchrun() -> None:
    """From now on the end of torchrun is a SIGTERM to this process, which saves."""
    if is_under_torchrun():
        end_with_parent(signal.SIGTERM)


def is_torchrun_gone() -> bool:
    """Whether this process was orphaned before it could ask the kernel for anything.

    The parent's number does not say so: a torchrun may be process 1, and an orphan's new parent may be any subreaper.
    But the torchrun of the first node listens on the ranks' store from before it starts them. Elsewhere it does not,
    and this is False.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("GROUP_RANK") != "0":
        return False
    try:
        with socket.create_connection(("localhost", int(os.environ["MASTER_PORT"])), timeout=CONNECT_S):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
