"""Detection of slow ranks."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafp8.config.schema import LoggingConfig, ParallelConfig, RunConfig
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks import Sinks
from megafp8.training.extensions.stragglers import MAX_NAMED, Stragglers, slow_ranks


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        ([100], []),
        ([100, 140], []),
        ([100, 160], [1]),
        ([160, 100], [0]),
        ([100, 100, 151, 100], [2]),
        ([100, 100, 200, 100, 900, 100], [4, 2]),
        ([0, 0], []),  # nothing is reduced, so nothing is known
        ([0, 50], []),
    ],
)
def test_slow_ranks_of_a_stage_are_found(times: list[float], slow: list[int]) -> None:
    assert [int(text.split()[1]) for text in slow_ranks(times, [0] * len(times))] == slow


def test_stages_are_not_compared() -> None:
    """The first stage has its gradients last."""
    assert list(slow_ranks([300, 310, 100, 250], [0, 0, 1, 1])) == [
        "rank 3 needs 250 ms per step until its gradients are ready, 2.5 times the median of 100 ms"
    ]


def test_of_many_slow_ranks_the_slowest_are_named() -> None:
    *named, rest = slow_ranks([100] * 30 + [200 + rank for rank in range(20)], [0] * 50)
    assert [int(text.split()[1]) for text in named] == list(range(49, 49 - MAX_NAMED, -1))
    assert rest == f"{20 - MAX_NAMED} more ranks need more than 1.5 times the median of their stage"


def test_every_time_is_in_one_median(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is in proportion to the number of ranks."""
    sizes, num_ranks = list[int](), 4096
    median_low = statistics.median_low
    monkeypatch.setattr(statistics, "median_low", lambda values: sizes.append(len(values)) or median_low(values))
    stages = [rank * 8 // num_ranks for rank in range(num_ranks)]
    assert list(slow_ranks([100 + rank % 7 for rank in range(num_ranks)], stages)) == []
    assert sizes == [num_ranks // 8] * 8


class Recorded:
    """What an extension of one rank of several wrote and communicated; the others took 100 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, graph: bool = False, world_size: int = 8):
        self.records: list[Any] = []
        self.shapes: list[tuple[int, ...]] = []
        config = RunConfig(
            logging=LoggingConfig(log_interval=2), parallel=ParallelConfig(pipeline_model_parallel_size=2)
        )
        run = SimpleNamespace(
            config=config, graph=SimpleNamespace(has_graphs=graph), training_state=SimpleNamespace(chunks=[]),
            rank_position=SimpleNamespace(rank=rank, world_size=world_size),
            platform=SimpleNamespace(kind="cpu", device=torch.device("cpu")),
        )  # fmt: skip
        self.sinks = Sinks([SimpleNamespace(write=self.records.append, close=lambda: None)])
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)
        for name in ("all_gather", "gather", "all_gather_into_tensor", "all_gather_object"):
            monkeypatch.setattr(dist, name, lambda *args, **kwargs: pytest.fail("another collective"))
        stragglers = Stragglers()
        state: Any = SimpleNamespace(run=run, step=0, sinks=self.sinks)
        stragglers.open(state)
        for state.step in (1, 2):
            stragglers.before_step(state)
            if stragglers.is_active:
                stragglers.started, stragglers.ready = 1.0, 1.2
            stragglers.after_step(state, None)  # type: ignore[arg-type]  # not read
        self.sinks.flush()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.shapes.append(tuple(tensor.shape))
        assert tensor.count_nonzero() == 1, "a rank adds its own time only"
        tensor[tensor == 0] = 100


@pytest.mark.parametrize("rank", [0, 5])
def test_a_logged_step_has_one_reduction_of_one_time_a_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 compares them."""
    found = Recorded(monkeypatch, rank)
    assert found.shapes == [(8,)]
    events = [record for record in found.records if isinstance(record, EventRecord)]
    text = "rank 0 needs 200 ms per step until its gradients are ready, 2.0 times the median of 100 ms"
    assert [(event.step, event.name, event.detail) for event in events] == [(2, "straggler", text)] * (rank == 0)


@pytest.mark.parametrize(("graph", "world_size"), [(True, 8), (False, 1)])
def test_nothing_is_compared_in_cuda_graphs_and_on_one_rank(
    graph: bool, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Recorded(monkeypatch, 0, graph, world_size)
    assert found.shapes == [] and found.records == []
