"""Processes that work on tasks and send back results as they have them.

What concurrent.futures lacks for hours of work: a task gives many results, a worker whose parent is killed ends by
itself (its pipe breaks), and one that is killed is an error at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")
# Tasks that a worker has at hand, so that it does not wait for the parent between two.
TASKS_AHEAD = 2


class WorkerDiedError(Exception):
    """A worker ended without a word. The text says how."""


def run_tasks(work: Callable[[Task], Iterator[Result]], tasks: Sequence[Task], workers: int) -> Iterator[Result]:
    """Yield everything that `work` yields for the tasks, as it comes: in order only with one worker.

    Args:
        work: called once a task. With several workers it runs in processes forked from this one (spawned where fork is
            not safe, on macOS); tasks, results and exceptions are pickled.
        tasks: handed out in order.
        workers: processes; 1 works in this process.

    Raises:
        WorkerDiedError: a worker was killed.
        Exception: what `work` raises. The other workers are stopped.
    """
    workers = min(workers, len(tasks))
    if workers <= 1:
        for task in tasks:
            yield from work(task)
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool: dict[Connection, Any] = {}
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            # A forked worker has the ends of the workers before it, which would keep their pipes from breaking.
            inherited = [*pool, ours] if context.get_start_method() == "fork" else []
            process = context.Process(target=_serve, args=(work, theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            pool[ours] = process
        yield from _collect(pool, list(tasks))
    finally:
        for connection, process in pool.items():
            connection.close()
            process.terminate()
            process.join()


def _collect(pool: dict[Connection, Any], tasks: list[Any]) -> Iterator[Any]:
    tasks.reverse()
    at_hand = dict.fromkeys(pool, 0)

    def hand_out(connection: Connection) -> None:
        # Near the end nothing is put by, lest one worker has two tasks and another none.
        while tasks and (not at_hand[connection] or (at_hand[connection] < TASKS_AHEAD and len(tasks) > len(pool))):
            try:
                connection.send(tasks.pop())
            except BrokenPipeError as error:
                raise WorkerDiedError(_describe_end(pool[connection])) from error
            at_hand[connection] += 1

    for connection in pool:
        hand_out(connection)
    while any(at_hand.values()):
        for connection in wait([connection for connection, count in at_hand.items() if count]):
            try:
                kind, content = connection.recv()
            except (EOFError, ConnectionResetError) as error:
                raise WorkerDiedError(_describe_end(pool[connection])) from error
            if kind == "raised":
                raise content
            if kind == "done":
                at_hand[connection] -= 1
                hand_out(connection)
            else:
                yield content


def _serve(work: Callable[[Any], Iterator[Any]], connection: Connection, inherited: list[Connection]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent stops its workers
    # One process a core is all the parallelism there is to have; `tokenizers` would start its threads on top.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for other in inherited:
        other.close()
    while True:
        try:
            task = connection.recv()
        except (EOFError, ConnectionResetError):
            return  # the parent is gone
        try:
            for result in work(task):
                connection.send(("result", result))
            connection.send(("done", None))
        except BrokenPipeError:
            return
        except Exception as error:
            connection.send(("raised", error))
            return


def _describe_end(process: Any) -> str:
    process.join(timeout=10)
    code = process.exitcode
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}"
