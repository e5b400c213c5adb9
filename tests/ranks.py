"""Run a function on several gloo ranks, forked from this process.

A forked rank inherits every import, so a test on four ranks takes about a second. With spawned ranks it takes ten. Two
rules make forking safe. This process computes on one thread (`conftest.py` sets this first), because a forked child
inherits the locks of a thread pool but not its threads. And it never joins a process group itself, so even tests of one
rank run in a child.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
import torch._dynamo  # the first optimizer would import it, in every rank
import torch.distributed as dist

from megafp8.utils.process import set_worker_death_signal

# Once a rank has failed, the others hang in a collective or fail too. Their errors within this time are reported.
GRACE_S = 1.0
SET_NUM_THREADS = torch.set_num_threads


class RankFailed(AssertionError):
    """A rank raised, died or hung. The message has its number and its traceback; `__cause__` is its exception."""


@dataclass(frozen=True)
class Answer:
    """What a rank sends back: a pickled result, or an exception (pickled if possible) with its traceback."""

    result: Optional[bytes] = None
    error: Optional[bytes] = None
    trace: str = ""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 90.0) -> list[Any]:
    """Call `function(*args)` on every rank of a gloo group and return the results, by rank.

    Args:
        function: any callable, also a closure. `torch.distributed` runs when it is called, and the launcher's
            variables (`RANK`, `WORLD_SIZE`...) are set.
        timeout_s: seconds after which every rank is killed.

    Raises:
        RankFailed: a rank raised or did not answer in time; no process is left behind.
    """
    if torch.cuda.is_available():
        pytest.skip("CPU ranks need a process that sees no GPU: CUDA_VISIBLE_DEVICES= python -m pytest")
    with tempfile.TemporaryDirectory(prefix="ranks_") as name, forked(world_size, Path(name), function, args) as ranks:
        answers, silent = collect([pipe for _, pipe in ranks], timeout_s)
        failures = [(rank, answer) for rank, answer in answers.items() if answer.result is None]
        if failures:
            raise failure_of(failures)
        if silent:
            stacks = [stack_of(rank, ranks[rank][0], Path(name)) for rank in silent]
            raise RankFailed(f"ranks {silent} gave no answer in {timeout_s:g} s\n" + "\n".join(stacks))
    return [pickle.loads(answers[rank].result or b"") for rank in range(world_size)]


@contextlib.contextmanager
def forked(
    world_size: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """The ranks' processes and the pipe of each. Neither they nor their own children outlive the block."""
    context, ranks = multiprocessing.get_context("fork"), []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=be_rank, args=(rank, world_size, folder, theirs, function, args))
            process.start()
            theirs.close()
            ranks.append((process, ours))
        yield ranks
        for process, _ in ranks:
            process.join(GRACE_S)
    finally:
        for process, pipe in ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.is_alive():
                process.kill()
            process.join()
            pipe.close()


def be_rank(
    rank: int, world_size: int, folder: Path, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Entry point of one rank."""
    become_rank(rank, world_size, folder)
    try:
        join_gloo(rank, world_size, folder)
        pipe.send(Answer(result=pickle.dumps(function(*args))))
        dist.destroy_process_group()
    except BaseException as error:
        pipe.send(Answer(error=pickled(error), trace=traceback.format_exc()))


def become_rank(rank: int, world_size: int, folder: Path) -> None:
    """Make a forked child a rank, with a launcher's variables.

    Args:
        folder: where its stack is written on SIGUSR1.
    """
    become_child()
    # multiprocessing imports and inherits; the file stays open as long as the process lives.
    faulthandler.register(signal.SIGUSR1, file=(folder / f"stack{rank}").open("w"), all_threads=False)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": "lo",
    }


SET_NUM_THREADS = torch.set_num_threads


def become_child() -> None:
    """First action of a forked child: its own process group, which dies with the parent, and one thread."""
    # A pool of threads hangs here if the test process ever had one: set_num_threads has no effect in ranks.
    # Grandchildren must also make the call: the first one after a fork replaces the inherited pool, and two threads
    # that make it at the same time fail an assertion of torch.
    SET_NUM_THREADS(1)
    torch.set_num_threads = lambda threads: None
    gc.freeze()  # inherited objects are excluded from collection, which would traverse and so copy them
    os.setpgid(0, 0)  # with its children it is one group, which can be killed together
    set_worker_death_signal(signal.SIGKILL)  # a killed test run leaves no process behind


def join_gloo(rank: int, world_size: int, folder: Path) -> None:
    """Join the ranks that meet in a folder, and wait until all have."""
    store = dist.FileStore(str(folder / "rendezvous"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()  # otherwise a rank with nothing to do would leave while another one still connects to it


def pickled(error: BaseException) -> Optional[bytes]:
    """The exception's bytes; None if it cannot be rebuilt from them."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def collect(pipes: list[Connection], timeout_s: float) -> tuple[dict[int, Answer], list[int]]:
    """Answers by rank in order of arrival, and the ranks that gave none. After a failure it waits only shortly."""
    answers: dict[int, Answer] = {}
    deadline = time.monotonic() + timeout_s
    while len(answers) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            try:
                answer = pipe.recv()
            except EOFError:
                answer = Answer(trace="the process died without a word")
            answers[waiting[pipe]] = answer
            if answer.result is None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return answers, [rank for rank in range(len(pipes)) if rank not in answers]


def failure_of(failures: list[tuple[int, Answer]]) -> RankFailed:
    """One exception for all failed ranks. The first to fail is the cause; the others may be its consequence."""
    text = "\n".join(f"rank {rank} failed:\n{answer.trace}" for rank, answer in failures)
    first = failures[0][1].error
    failed = RankFailed(text)
    failed.__cause__ = pickle.loads(first) if first else None
    return failed


def stack_of(rank: int, process: BaseProcess, folder: Path) -> str:
    """The stack of a silent rank, written by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
    path = folder / f"stack{rank}"
    deadline, text = time.monotonic() + GRACE_S, ""
    while time.monotonic() < deadline and (not text or text != path.read_text()):  # until nothing more is written
        text = path.read_text()
        time.sleep(0.02)
    return f"rank {rank} is at:\n{text}"
