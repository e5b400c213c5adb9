"""Ranks that wait for others end within their time limit, and name the missing ones."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist
from ranks import become_child

from benchmarks.ports import free_ports
from megafp8.device.rendezvous import join_store, ranks_text
from megafp8.errors import PeerLost


def be_rank(rank: int, world_size: int, timeout_s: float, environment: dict[str, str], pipe: Connection) -> None:
    become_child()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **environment}
    try:
        store = join_store(rank, world_size, timeout_s)
        store.add("met", 1)
        while int(store.add("met", 0)) < world_size:
            time.sleep(0.01)
        pipe.send("met")
    except PeerLost as error:
        pipe.send(str(error))
    pipe.recv()  # the rank with the store stays until all have answered


def be_agent(pipe: Connection) -> None:
    """The part of torchrun: its store."""
    become_child()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def started(function: Callable[..., None], *arguments: Any) -> Connection:
    """A process that ends when something is sent to it."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    context.Process(target=function, args=(*arguments, theirs), daemon=True).start()
    return ours


@pytest.fixture
def torchrun() -> Iterator[dict[str, str]]:
    """The variables of ranks that use torchrun's store."""
    agent = started(be_agent)
    yield {"MASTER_PORT": str(agent.recv()), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    agent.send(None)


def met(ranks: list[int], world_size: int, timeout_s: float, **environment: str) -> list[str]:
    """The result of each of these ranks."""
    pipes = [started(be_rank, rank, world_size, timeout_s, environment) for rank in ranks]
    answers = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(None)
    return answers


def port() -> str:
    return str(free_ports(1)[0])


def test_ranks_meet_at_the_store_of_rank_0() -> None:
    assert met([2, 0, 1], 3, 60.0, MASTER_PORT=port()) == ["met"] * 3


def test_ranks_meet_at_the_store_of_torchrun_also_when_it_starts_them_again(torchrun: dict[str, str]) -> None:
    assert met([0, 1], 2, 60.0, **torchrun) == ["met"] * 2
    (told,) = met([0], 2, 1.0, **torchrun, TORCHELASTIC_RESTART_COUNT="1")
    assert told.startswith("rank 1 of 2 did not connect")


def test_missing_ranks_are_named_within_the_bound(torchrun: dict[str, str]) -> None:
    expected = "of 5 did not connect within 1 s (--rendezvous-timeout-s)"
    for told in met([0, 3], 5, 1.0, **torchrun):
        assert told.startswith("ranks ") and {"1,", "2,", "4"} <= {*told.split()} and expected in told
    (told,) = met([0], 2, 1.0, MASTER_PORT=port())
    assert told.startswith("rank 1 of 2 did not connect within 1 s")


def test_a_missing_launcher_is_an_error_within_the_bound() -> None:
    (told,) = met([1], 2, 1.0, MASTER_PORT=port(), TORCHELASTIC_USE_AGENT_STORE="True")
    assert told.startswith("rank 1 cannot reach the other ranks: no connection to 127.0.0.1:")


@pytest.mark.parametrize(("count", "end"), [(1, "rank 0"), (16, "14, 15"), (30, "15 and 14 more")])
def test_not_every_rank_of_a_large_run_is_named(count: int, end: str) -> None:
    assert ranks_text(range(count)).endswith(end)
