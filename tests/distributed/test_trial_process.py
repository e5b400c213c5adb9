"""Ranks that try micro-batch sizes agree, also when the trial of one rank fails."""

from __future__ import annotations

import time

import fake_trials
import pytest
import torch.distributed as dist
from ranks import run_ranks
from small_run import small_config

from megafp8.errors import CheckpointError
from megafp8.training.micro_batch_search.messages import TrialResult, TrialSetup
from megafp8.training.micro_batch_search.processes import TrialProcess


def answers(sizes: list[int], end: str, timeout_s: float = 30.0) -> list[TrialResult]:
    """What this rank learns about the sizes."""
    setup = TrialSetup(config=small_config("llama", world_size=2), implementation=end, limit_bytes=0)
    process = TrialProcess(setup, fake_trials.serve, timeout_s)
    try:
        return [process.measure(size) for size in sizes]
    finally:
        process.close()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("raises", "CUDA out of memory"),
        ("killed", "the process was killed, probably because the system ran out of memory"),
        ("grows", "the process exceeded the memory limit"),
        ("breaks", "the process exceeded the memory limit"),  # and the other rank's sees a broken connection first
    ],
)
def test_out_of_memory_on_one_rank_rejects_the_size_on_all(end: str, reason: str) -> None:
    """The other rank's waiting process is terminated, and new processes try the next size. The worst rank counts."""
    began = time.monotonic()
    heard = run_ranks(2, answers, [4, 16, 8], end)
    assert heard[0] == heard[1] == [TrialResult(4001, 3.5), TrialResult(too_large=reason), TrialResult(8001, 2.25)]
    assert time.monotonic() - began < 30, "no rank waits for a finished trial"


@pytest.mark.parametrize(
    ("end", "reason"),
    [("crashes", "the process exited with status 3"), ("errs", "ValueError: no"), ("hangs", "no result within 2 s")],
)
def test_other_failures_are_reported_on_all_ranks(end: str, reason: str) -> None:
    heard = run_ranks(2, answers, [16], end, 2.0 if end == "hangs" else 30.0)
    assert heard == [[TrialResult(error=reason)]] * 2


def test_a_process_that_cannot_start_is_reported_on_all_ranks() -> None:
    """The process of one rank cannot be pickled. Neither rank waits, and both can close what they have."""

    def start() -> str:
        setup = TrialSetup(config=small_config("llama", world_size=2), implementation="raises", limit_bytes=0)
        process = TrialProcess(setup, fake_trials.serve if dist.get_rank() else lambda setup, pipe: None, 30.0)
        try:
            process.measure(4)
        except CheckpointError as error:
            return str(error)
        finally:
            process.close()
        return "started"

    told = run_ranks(2, start)
    assert told[0] == told[1] and told[0].startswith("rank 0: ") and "pickle" in told[0]


def test_a_single_rank_needs_no_collective() -> None:
    def one() -> tuple[list[TrialResult], bool]:
        setup = TrialSetup(config=small_config("llama"), implementation="raises", limit_bytes=0)
        process = TrialProcess(setup, fake_trials.serve, 30.0)
        heard = [process.measure(4), process.measure(16)]
        return heard, process.process is None and process.store is None and dist.is_initialized()

    assert run_ranks(1, one) == [([TrialResult(4000, 2.5), TrialResult(too_large="CUDA out of memory")], True)]
