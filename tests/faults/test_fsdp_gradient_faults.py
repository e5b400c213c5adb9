"""A bad gradient of one rank under FSDP2: the fault fires, all ranks stop, and codes tell which rank it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from nonfinite_runs import run_loop
from small_run import FP8, PLAIN

FSDP = f"{PLAIN} --bf16 --use-torch-fsdp2 --no-gradient-accumulation-fusion --train-iters 4 --micro-batch-size 1"
CODES = f"{FSDP} --grad-reduce-in-fp8"
REPLICAS = f"{CODES} --num-distributed-optimizer-instances 2"
ORIGIN_UNKNOWN = "a rank has rows of sums over ranks"


@pytest.mark.parametrize(
    ("world_size", "flags", "rank", "kind"),
    [
        (2, CODES, 0, "nan"),
        (2, CODES, 1, "inf"),
        (2, f"{CODES} --grad-reduce-fp8-scaling tensor {FP8} --fp8-param-gather --transformer-impl emulated", 1, "nan"),
        (4, REPLICAS, 3, "nan"),
        (4, f"{REPLICAS} --grad-reduce-fp8-intra-node bf16", 1, "inf"),
        (4, f"{CODES} --tensor-model-parallel-size 2", 2, "nan"),
    ],
)
def test_codes_name_the_rank(tmp_path: Path, world_size: int, flags: str, rank: int, kind: str) -> None:
    """The first element is in rows of the first rank, whichever rank brings it up."""
    text = run_loop(tmp_path, f"{kind}:rank={rank},step=2,at=step.gradients", flags, world_size).error
    assert text.startswith("step 2: loss or gradients are not finite")
    assert f"  rank {rank}: first bad tensor: gradient of decoder.layers." in text
    assert text.count("  rank ") == 1 and ORIGIN_UNKNOWN not in text


def test_two_ranks_are_named(tmp_path: Path) -> None:
    text = run_loop(tmp_path, "nan:step=2,at=step.gradients", CODES).error
    assert "  rank 0: first bad tensor: gradient of " in text and "  rank 1: first bad tensor: gradient of " in text


def test_without_codes_the_rank_is_not_known(tmp_path: Path) -> None:
    text = run_loop(tmp_path, "nan:rank=1,step=2,at=step.gradients", FSDP).error
    assert "step 2: " in text and "first bad tensor: gradient of decoder.layers." in text and ORIGIN_UNKNOWN in text


def test_a_bad_loss_is_of_its_rank(tmp_path: Path) -> None:
    text = run_loop(tmp_path, "nan:rank=1,step=2,at=step.loss", CODES).error
    assert "  rank 1: loss is not finite" in text and ORIGIN_UNKNOWN not in text and "  rank 0" not in text


def test_flags_of_a_skipped_step_are_cleared(tmp_path: Path) -> None:
    plan = "nan:rank=1,step=2,at=step.gradients;nan:rank=0,step=3,at=step.gradients"
    text = run_loop(tmp_path, plan, f"{CODES} --max-skipped-steps 1").error
    assert "step 3: " in text and "  rank 0: first bad tensor: gradient" in text and "  rank 1" not in text
