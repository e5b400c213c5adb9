"""Names of other trainers' settings lead to flags that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megafp8.config import megatron_flags
from megafp8.config.flag_parser import build_parser
from megafp8.config.settings import settings_by_flag
from megafp8.utils.strict_yaml import read_yaml

TABLE = Path(megatron_flags.__file__).with_name("other_programs.yaml")
LAUNCHER_FLAGS = {"--gpus-per-node", "--nproc-per-node"}


def test_every_entry_names_flags_that_exist_and_no_name_is_a_flag() -> None:
    known = build_parser()._option_string_actions.keys() | LAUNCHER_FLAGS
    rows = read_yaml(TABLE, as_written=True)
    names = [name for row in rows for name in row["names"].split()]
    assert len(names) == len(set(names))
    for row in rows:
        assert set(re.findall(r"--[a-z0-9-]+", row["use"])) <= known, row
    assert not {name for name in names if f"--{name.replace('_', '-')}" in settings_by_flag()}


@pytest.mark.parametrize(
    ("name", "as_key", "use"),
    [
        ("--learning_rate", False, "use --lr"),
        ("--max-steps", False, "use --train-iters"),
        ("training.local_batch_size", False, "use --micro-batch-size"),
        ("num_kv_heads", True, "use num_query_groups, with group_query_attention"),
        ("--max-batch-size", False, "use --micro-batch-size-max, with --micro-batch-size auto"),
        ("num_train_epochs", True, "use num_epochs"),
        ("--fp8_interval", True, "remove it: the scales are updated in every step"),
        ("steps_of_nothing", False, ""),
    ],
)
def test_a_name_is_found_by_flag_key_or_last_part(name: str, as_key: bool, use: str) -> None:
    assert megatron_flags.of_other_program(name, as_key=as_key) == use
