"""Runs of the training loop under a plan of faults, on forked ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from megatron.core.utils import to_local_if_dtensor
from ranks import run_ranks
from small_run import build_run, fingerprint, small_config, weights

from megafp8.checkpoint.progress import Progress
from megafp8.errors import NumericsError
from megafp8.resilience import fault_injection
from megafp8.training.pretrain import train

LENGTH = "--lr-warmup-iters 1 --eval-iters 0 --no-progress-bar"


def inject(plan: str) -> None:
    """Set the plan of faults in a rank that is already forked."""
    made = fault_injection.FaultPlan(fault_injection.read_plan(plan), dist.get_rank())
    fault_injection.point, fault_injection.poison = made.point, made.poison


@dataclass(frozen=True)
class Ended:
    """How a start of a run ended, equal on all ranks.

    Attributes:
        progress: None if non-finite values stopped it.
        weights: of each rank, hashed.
        error: the error that stopped it, or an empty string.
    """

    progress: Progress | None
    weights: list[str]
    error: str


def run_loop(folder: Path, plan: str, flags: str, world_size: int = 2) -> Ended:
    """Start or resume a run."""
    config = small_config("llama", f"{LENGTH} --save {folder} --load {folder} {flags}", world_size)

    def start() -> tuple[Progress | None, str, str]:
        inject(plan)
        run = build_run(config)
        try:
            progress, error = train(run), ""
        except NumericsError as raised:
            progress, error = None, str(raised)
        local = {name: to_local_if_dtensor(tensor) for name, tensor in weights(run).items()}
        return progress, fingerprint(local), error

    progresses, hashes, errors = zip(*run_ranks(world_size, start), strict=True)
    assert len(set(progresses)) == len(set(errors)) == 1, "all ranks end alike"
    return Ended(progresses[0], list(hashes), errors[0])
