"""Results and errors of an action on several ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from ranks import run_ranks

from megafp8.device.collective_errors import call_on_rank_0, gather_on_rank_0
from megafp8.errors import CheckpointError


def test_only_rank_0_has_gathered_results() -> None:
    def gather() -> list[str]:
        return gather_on_rank_0(lambda: "x" * dist.get_rank())

    assert gather_on_rank_0(lambda: 1) == [1]  # without a process group
    assert run_ranks(3, gather) == [["", "x", "xx"], [], []]


@pytest.mark.parametrize("function", [gather_on_rank_0, call_on_rank_0])
def test_an_error_is_raised_on_all_ranks(function) -> None:
    def fail() -> None:
        if dist.get_rank() == 0:
            raise OSError("disk")

    def call() -> str:
        with pytest.raises(CheckpointError) as caught:
            function(fail)
        return str(caught.value)

    assert run_ranks(2, call) == ["rank 0: OSError: disk"] * 2


def test_a_result_of_rank_0_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered from all ranks, each rank would have as much memory for it as there are ranks."""
    gathered = []
    gather = dist.all_gather_object
    monkeypatch.setattr(
        dist, "all_gather_object", lambda answers, answer: gathered.append(answer) or gather(answers, answer)
    )

    def call() -> tuple[str, list[object]]:
        return call_on_rank_0(lambda: "result"), gathered

    assert run_ranks(2, call) == [("result", [(None, None)])] * 2
