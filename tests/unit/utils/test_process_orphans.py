"""Processes whose parent ended before they could ask the kernel to be signalled."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys

import pytest
from ranks import become_child

from benchmarks.ports import free_ports
from megafp8.utils.process import set_parent_death_signal, set_worker_death_signal

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0"}
RANK = "from megafp8.utils.process import die_with_torchrun; die_with_torchrun(); print('trains')"


def be_orphan(parent: int) -> None:
    set_parent_death_signal(signal.SIGKILL, parent)


def test_a_process_whose_parent_ended_first_gets_the_signal_at_once() -> None:
    context = multiprocessing.get_context("fork")
    for parent, status in ((os.getpid(), 0), (os.getppid(), -signal.SIGKILL)):
        process = context.Process(target=be_orphan, args=(parent,))
        process.start()
        process.join()
        assert process.exitcode == status


def outlive(lives: int, parent: int) -> None:
    """A process that waits for the end of its parent, and reports if it survives its request to end with it.

    On a busy machine the parent may have ended before this begins.
    """
    while os.getppid() == parent:
        pass
    set_worker_death_signal(signal.SIGKILL)
    os.write(lives, b"it lives")


def be_starter(lives: int) -> None:
    become_child()
    multiprocessing.get_context("fork").Process(target=outlive, args=(lives, os.getpid())).start()
    os._exit(0)


def test_a_multiprocessing_child_detects_a_dead_parent() -> None:
    reads, writes = os.pipe()
    starter = multiprocessing.get_context("fork").Process(target=be_starter, args=(writes,))
    starter.start()
    os.close(writes)
    starter.join()
    with open(reads, "rb") as stream:
        assert stream.read() == b""  # at the end of the last process that could write


def rank(port: int, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | TORCHRUN | {"MASTER_PORT": str(port)} | environment
    return subprocess.run([sys.executable, "-c", RANK], env=variables, capture_output=True, text=True)


def test_a_rank_ends_if_its_torchrun_has_ended() -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        assert rank(port).stdout == "trains\n"
    ended = rank(port)
    assert ended.returncode == 70 and "torchrun, which started this rank, is gone" in ended.stderr


@pytest.mark.parametrize("variable", [{"GROUP_RANK": "1"}, {"TORCHELASTIC_USE_AGENT_STORE": "False"}])
def test_the_store_of_another_torchrun_is_ignored(variable: dict[str, str]) -> None:
    assert rank(*free_ports(1), **variable).stdout == "trains\n"
