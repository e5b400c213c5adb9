"""Runs with and without the distributed optimizer, FSDP2 included, load each other's checkpoints.

From one to the other and back, a checkpoint has the content of before, bitwise; and the steps after a load are those of
the run that saved.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import test_resharding
from ranks import run_ranks
from small_run import small_config
from tolerances import LAYOUT_LOSS

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.fingerprint import fingerprint
from megafp8.config.schema import RunConfig

SMALL = test_resharding.SMALL.replace(" --use-distributed-optimizer", " --no-gradient-accumulation-fusion")
SHARDED, FSDP = "--use-distributed-optimizer", "--use-torch-fsdp2"
BF16_LOSS = 2e-3


def config_of(flags: str) -> RunConfig:
    return small_config("llama", f"{SMALL} {flags}", 2)


@pytest.mark.parametrize("precision", ["", "--bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("first", "second"), [(SHARDED, FSDP), ("", SHARDED)], ids=["sharded-fsdp2", "plain-sharded"])
def test_state_survives_an_exchange(first: str, second: str, precision: str, tmp_path: Path) -> None:
    own, other = config_of(f"{precision} {first}"), config_of(f"{precision} {second}")
    there, back = {"first": tmp_path / "first"}, {"first": tmp_path / "there" / "first"}
    unbroken = run_ranks(2, test_resharding.run_first, own, there["first"])[0]
    passage = run_ranks(2, test_resharding.load_all_checkpoints, other, there, tmp_path / "there")[0]["first"]
    returned = run_ranks(2, test_resharding.load_all_checkpoints, own, back, tmp_path / "back")[0]["first"]
    saved = fingerprint(checkpoint_path(there["first"], test_resharding.STEPS))
    assert passage.parts["weights"] == saved["weights"]
    assert {part: returned.parts[part] for part in test_resharding.PARTS} == {
        part: saved[part] for part in test_resharding.PARTS
    }
    assert returned.losses == unbroken
    errors = [abs(a - b) for a, b in zip(passage.losses, unbroken, strict=True)]
    assert max(errors) <= (BF16_LOSS if precision else LAYOUT_LOSS), errors
