"""Process identity, parent-death signals, stop signals and background threads. Linux only: it reads /proc.

Ranks import this module before torch, to learn that torchrun died while they were still importing. It therefore
imports nothing that is slow to load.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, TypeVar

from megafp8.errors import PeerLost

if TYPE_CHECKING:
    from concurrent.futures import Future

# State letters of /proc/PID/stat.
ENDED_STATES = ("Z", "X", "x")
STOPPED_STATE = "T"
PR_SET_PDEATHSIG = 1  # of prctl(2)
SLURM_JOB_VARIABLE = "SLURM_JOB_ID"
JOBSET_VARIABLE = "JOBSET_UID"  # the manifests of `launch/kubernetes.py` set it
# Signals on which a run saves a checkpoint and exits. SIGHUP means that the terminal was closed.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
STDERR = 2  # file descriptor; sys.stderr may be replaced
CONNECT_TIMEOUT_S = 5.0  # for a connection within this machine
T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """Identity of a process, unique across machines, reboots and reused PIDs.

    Attributes:
        host: hostname, for messages.
        place: boot id and PID namespace in which `pid` is valid.
        started: start time in clock ticks since boot; it tells apart two processes with the same PID.
        job: id of the Slurm job or JobSet; None outside of both.
    """

    host: str
    place: str
    pid: int
    started: int
    job: Optional[str] = None

    def state(self) -> Optional[str]:
        """State letter from /proc/PID/stat, `X` if the process has exited, None if it is on another machine."""
        if self.place != pid_namespace():
            return None
        state, started = read_proc_stat(self.pid) or ("X", self.started)
        return state if started == self.started else "X"

    def is_alive(self) -> Optional[bool]:
        """Whether the process is running or stopped; None if it is on another machine."""
        state = self.state()
        return None if state is None else state not in ENDED_STATES

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def current_process() -> Process:
    """Identity of the calling process."""
    _, started = read_proc_stat(os.getpid()) or ("", 0)
    return Process(os.uname().nodename, pid_namespace(), os.getpid(), started, job_id())


def package_environment() -> dict[str, str]:
    """The environment of a child process that runs a module of this package, also of a checkout."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def job_id() -> Optional[str]:
    """Id of the Slurm job or JobSet of this process, which its restarts share; None outside of both."""
    return os.environ.get(SLURM_JOB_VARIABLE) or os.environ.get(JOBSET_VARIABLE) or None


def handled_stop_signals() -> tuple[signal.Signals, ...]:
    """The stop signals to install handlers for: all but SIGHUP under `nohup`, which starts a process ignoring it."""
    has_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (has_nohup and number == signal.SIGHUP))


def set_parent_death_signal(number: int, parent: Optional[int] = None) -> None:
    """Have the kernel send this process a signal when the thread that started it exits.

    Args:
        number: the signal.
        parent: PID of the starting process, if known. If it has exited before this call, the signal is sent now.
    """
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def set_worker_death_signal(number: int) -> None:
    """`set_parent_death_signal` in a worker of multiprocessing, which knows the PID of its parent."""
    import multiprocessing

    starter = multiprocessing.parent_process()
    set_parent_death_signal(number, None if starter is None else starter.pid)


@functools.cache
def pid_namespace() -> str:
    """Boot id and PID namespace: different after a reboot, on another machine and in another container."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def read_proc_stat(pid: int) -> Optional[tuple[str, int]]:
    """State letter and start time in clock ticks of a process in this PID namespace; None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the process name in parentheses may contain spaces
    return fields[0], int(fields[19])


def in_thread(action: Callable[..., T], *arguments: Any) -> Future[T]:
    """Run `action(*arguments)` in a new daemon thread.

    Unlike a thread of `ThreadPoolExecutor`, one that hangs on a dead file system does not keep the process alive.
    """
    from concurrent.futures import Future

    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(action(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name=f"megafp8-{getattr(action, '__name__', 'work')}").start()
    return future


def exit_later(seconds: float) -> None:
    """Have a thread of faulthandler write the stacks and exit with status 1 after this time, unless it is cancelled.

    It works also where Python's threads cannot run. Without memory for it, nothing happens.
    """
    with contextlib.suppress(RuntimeError, MemoryError):
        faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)


def is_under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def die_with_torchrun() -> None:
    """Have the kernel kill this process when torchrun exits, and exit now if torchrun has exited already.

    The signal is SIGKILL because a rank before its rendezvous has nothing to save; afterwards `stop_with_torchrun`
    replaces it. The kernel watches the thread that started this process, which is torchrun's main thread.
    """
    if not is_under_torchrun():
        return
    set_parent_death_signal(signal.SIGKILL)
    if _is_torchrun_gone():
        print("torchrun, which started this rank, is gone: the rank ends too", file=sys.stderr, flush=True)
        sys.exit(PeerLost.exit_status)


def stop_with_torchrun() -> None:
    """Replace the signal of `die_with_torchrun` by SIGTERM, on which a run saves a checkpoint."""
    if is_under_torchrun():
        set_parent_death_signal(signal.SIGTERM)


def _is_torchrun_gone() -> bool:
    """Whether torchrun exited before `set_parent_death_signal` was called.

    The parent PID does not tell: torchrun may be PID 1, and any subreaper may adopt an orphan. But torchrun on the
    first node hosts the ranks' TCPStore, so a refused connection means that it is gone. On other nodes, where it hosts
    no store, the result is False.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("GROUP_RANK") != "0":
        return False
    import socket  # here, because --help imports this module

    try:
        with socket.create_connection(("localhost", int(os.environ["MASTER_PORT"])), timeout=CONNECT_TIMEOUT_S):
            return False
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
