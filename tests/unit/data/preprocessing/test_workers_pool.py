"""Tasks in processes: every result is returned, errors and deaths are reported, and no process is left."""

import os
import signal
import time

import psutil
import pytest

from megafp8.data.preprocessing.workers import run_tasks
from megafp8.errors import DataError
from megafp8.utils.process import ENDED_STATES, read_proc_stat


def count_up(task: int):
    for number in range(task):
        yield task, number


def raise_at_five(task: int):
    yield task
    if task == 5:
        raise OSError(28, "No space left on device")


def die_at_five(task: int):
    if task == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    yield task


def tell_pid(task: int):
    yield os.getpid()
    time.sleep(task)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_every_result_is_returned(workers):
    expected = [(task, number) for task in range(7) for number in range(task)]
    found = list(run_tasks(count_up, range(7), workers))
    assert sorted(found) == expected
    if workers == 1:
        assert found == expected


def test_no_tasks():
    assert list(run_tasks(count_up, [], 2)) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_task_is_raised(workers):
    with pytest.raises(OSError, match="No space left") as caught:
        list(run_tasks(raise_at_five, range(20), workers))
    assert caught.value.errno == 28


def test_a_worker_that_is_killed_is_an_error():
    with pytest.raises(DataError, match="process died: signal SIGKILL.*fewer --workers than 2"):
        list(run_tasks(die_at_five, range(20), 2))


def test_workers_end_when_the_caller_stops():
    results = run_tasks(tell_pid, [60] * 4, 2)
    pids = {next(results), next(results)}
    assert len(pids - {os.getpid()}) == 2
    results.close()
    assert not any(map(psutil.pid_exists, pids))


def test_workers_end_when_their_parent_is_killed():
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        for pid in run_tasks(tell_pid, [0.2] * 100, 2):
            os.write(writer, b"%d\n" % pid)
        os._exit(0)
    pids = set()
    while len(pids) < 2:
        pids |= set(map(int, os.read(reader, 1000).split()))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + 20
    while any((read_proc_stat(pid) or ENDED_STATES)[0] not in ENDED_STATES for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
