"""The file of a study: its valid content, and a report of all errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.errors import ConfigError
from megafp8.launch.study import read_study


def read(tmp_path: Path, text: str):
    path = tmp_path / "sweep.yaml"
    path.write_text(text, encoding="utf-8")
    return read_study(path)


def test_axes_are_named_options_or_values_of_a_flag(tmp_path: Path) -> None:
    study = read(
        tmp_path,
        """
        gpus: 2
        grid:
          size:
            small: --num-layers 2 --override 'transformer.x=a b'
            large: {flags: --num-layers 4, gpus: 8, tokens: 2e9}
          weight_decay: [0.1, 1e-3]
          tokens_per_parameter: [10, 20]
        """,
    )
    assert study.name == "sweep" and study.folder == Path("runs/sweep")
    assert study.common.flags == () and study.common.sizes == {"gpus": 2}
    (grid,) = study.grids
    small, large = grid["size"]
    assert small.flags == ("--num-layers", "2", "--override", "transformer.x=a b") and not small.sizes
    assert large.flags == ("--num-layers", "4") and large.sizes == {"gpus": 8, "tokens": 2e9}
    assert [option.flags for option in grid["weight_decay"]] == [("--weight-decay", "0.1"), ("--weight-decay", "1e-3")]
    assert [dict(option.sizes) for option in grid["tokens_per_parameter"]] == [
        {"tokens_per_parameter": 10}, {"tokens_per_parameter": 20},
    ]  # fmt: skip


def test_there_may_be_several_grids(tmp_path: Path) -> None:
    assert [list(grid) for grid in read(tmp_path, "grid: [{seed: [1]}, {lr: [1], seed: [2]}]").grids] == [
        ["seed"], ["lr", "seed"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1, 2]", "must be a mapping with the keys"),
        ("a: [", "not YAML"),
        ("seeds: [1]\ngrid: {seed: [1]}", "unknown key 'seeds'"),
        ("grid: 3", "'3' must be a mapping of axes"),
        ("grid: {seed: 3}", "seed: '3' must be a list of values, or a mapping"),
        ("grid: {seed: []}", "must be a list of values, or a mapping"),
        ("grid: {lr: [{a: b}]}", "lr: {'a': 'b'} cannot be the value of a flag"),
        ("grid: {size: {a: {flag: --bf16}}}", "size: a: unknown key 'flag'"),
        ("grid: {size: {a: [x]}}", "size: a: ['x'] must be a string of flags"),
        ("grid: {size: {a: --x 'b}}", "No closing quotation"),
        ("grid: {tokens: [many]}", "tokens: 'many' must be a number above 0"),
        ("gpus: -1\ngrid: {seed: [1]}", "gpus: '-1' must be a number above 0"),
        ("name: two words\ngrid: {seed: [1]}", "name: 'two words': letters, digits and . _ + - only"),
        ("slurm: fast\ngrid: {seed: [1]}", "slurm: 'fast' must be a mapping"),
    ],
)
def test_errors_are_reported(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=".*") as refused:
        read(tmp_path, text)
    assert told in str(refused.value)


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, "tokens: x\ngrid: {seed: 3, size: {a: [3]}}")
    assert len(refused.value.problems) == 3


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_study(tmp_path / "none.yaml")
