"""The harness that forks ranks: results in order, failures with rank and traceback, no process left behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, run_ranks


def test_results_are_ordered_by_rank() -> None:
    def add(number: int) -> tuple[int, int, str]:
        total = torch.tensor(dist.get_rank() + number)
        dist.all_reduce(total)
        return dist.get_rank(), int(total), os.environ["RANK"]

    assert run_ranks(3, add, 10) == [(0, 33, "0"), (1, 33, "1"), (2, 33, "2")]


def test_large_results_are_returned() -> None:
    def fill() -> torch.Tensor:
        return torch.full((1 << 18,), float(dist.get_rank()))

    assert [float(result.sum()) for result in run_ranks(2, fill)] == [0.0, 2.0**18]


def test_a_parent_that_has_computed_gradients_can_fork() -> None:
    torch.ones(3, requires_grad=True).sum().backward()

    def gradient() -> float:
        x = torch.ones(3, requires_grad=True)
        (x @ x).backward()
        return float(x.grad.sum())

    assert run_ranks(2, gradient) == [6.0, 6.0]


def test_an_exception_arrives_with_rank_and_traceback() -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise KeyError("what went wrong")
        dist.barrier()

    began = time.monotonic()
    with pytest.raises(RankFailed, match="(?s)rank 1 failed:.*in fail.*what went wrong") as caught:
        run_ranks(2, fail)
    assert isinstance(caught.value.__cause__, KeyError)
    assert time.monotonic() - began < 10, "the rank in the barrier is not waited for"


def test_a_dying_rank_is_reported() -> None:
    def die() -> None:
        if dist.get_rank() == 0:
            os._exit(1)
        dist.barrier()

    with pytest.raises(RankFailed, match="rank 0 failed:\nthe process died"):
        run_ranks(2, die)


def test_a_hanging_rank_reports_its_stack_and_is_killed_with_its_children() -> None:
    marker = f"{time.time_ns()}"

    def hang() -> None:
        if dist.get_rank() == 1:
            with subprocess.Popen(["sleep", f"1000.{marker}"]):
                wait_for_ever()

    def wait_for_ever() -> None:
        time.sleep(1000)

    with pytest.raises(RankFailed, match=r"(?s)ranks \[1\] gave no answer in 2 s.*rank 1 is at:.*wait_for_ever"):
        run_ranks(2, hang, timeout_s=2)
    assert f"1000.{marker}" not in commands()


def commands() -> str:
    """Command lines of all processes."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{name}/cmdline").read_text())
    return "\n".join(found)


def test_one_rank_is_a_process_group() -> None:
    assert run_ranks(1, lambda: (dist.get_world_size(), dist.get_backend())) == [(1, "gloo")]
    assert not dist.is_initialized(), "the parent never joins one"
