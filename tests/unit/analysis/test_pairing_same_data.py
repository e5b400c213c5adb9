"""Runs with other data are reported, and get no verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import pytest

from megafp8.analysis import tables
from megafp8.analysis.compare import Comparison, compare_runs
from megafp8.analysis.runs import load_runs

SHARD = ["/data/a_text_document"]


@pytest.fixture
def compare(write_run) -> Callable[..., Comparison]:
    """Compares two seeds each of two recipes with equal losses and the given data and training settings."""

    def run(
        base: dict[str, Any], other: dict[str, Any], *, training: Optional[dict[str, Any]] = None, **fields: Any
    ) -> Comparison:
        common = {"data_path": SHARD, "split": None, "mock_data": False, "seq_length": 64}
        batch = {"micro_batch_size": 2, "global_batch_size": 8}
        recipes = {"bf16": ({}, common | base, batch), "fp8": (fields, common | other, batch | (training or {}))}
        return compare_runs(
            load_runs(
                write_run(
                    f"{name}/seed{seed}", [4.0] * 8, validations={8: 2.0}, recipe=name,
                    config={"data": data, "training": settings | {"seed": seed}}, **more,
                )
                for name, (more, data, settings) in recipes.items() for seed in (1, 2)
            )
        )  # fmt: skip

    return run


@pytest.mark.parametrize(
    ("base", "other", "what", "values"),
    [
        ({}, {"data_path": ["/data/b_text_document"]}, "training data", ("b_text_document", "a_text_document")),
        ({}, {"data_path": [], "mock_data": True}, "training data", ("mock data", "a_text_document")),
        ({"data_path": ["1", "a", "3", "b"]}, {"data_path": ["1", "a", "1", "b"]}, "training data",
         ("0.5 a, 0.5 b", "0.25 a, 0.75 b")),
        ({}, {"split": "99,1,0"}, "split", ("0.99,0.01,0", "0.969,0.03,0.001")),
        ({"train_data_path": ["a"], "valid_data_path": ["b"]}, {"train_data_path": ["a"], "valid_data_path": ["c"]},
         "validation data", ("c", "b")),
        ({}, {"seq_length": 128}, "sequence length", ("128", "64")),
    ],
)  # fmt: skip
def test_other_data_is_reported_with_both_values_and_gives_no_verdict(compare, base, other, what, values) -> None:
    comparison = compare(base, other)
    row = comparison.recipes[1]
    assert (row.verdict, row.other_data) == ("not decided", (what,))
    assert len(comparison.warnings) == 2
    assert comparison.warnings[0].startswith(f"fp8/seed1 has {what} {values[0]}, bf16/seed1 {values[1]}: ")
    for output in (tables.to_text(comparison), tables.to_markdown(comparison)):
        assert f"fp8 and bf16 cannot be compared: they differ in {what}." in output


def test_another_global_batch_gives_no_verdict(compare) -> None:
    comparison = compare({}, {}, training={"global_batch_size": None}, layout={"data": 2})
    assert "fp8/seed1 has global batch 4, bf16/seed1 8" in comparison.warnings[0]
    assert comparison.recipes[1].verdict == "not decided"


def test_another_number_of_validation_tokens_gives_no_verdict(compare) -> None:
    comparison = compare({}, {}, num_eval_tokens=400)
    assert comparison.warnings[0].startswith("fp8/seed1 was validated on 400 tokens, bf16/seed1 on 500")
    assert comparison.recipes[1].verdict == "not decided"


@pytest.mark.parametrize(
    ("base", "other"),
    [
        ({}, {}),
        ({}, {"data_path": ["/elsewhere/a_text_document"]}),
        ({}, {"split": "969,30,1"}),
        ({"split": "98,1,1"}, {"split": "980,10,10"}),
        ({"data_path": ["3", "a", "1", "b"]}, {"data_path": ["0.75", "x/a", "0.25", "b"]}),
    ],
)
def test_equivalent_data_settings_are_equal(compare, base, other) -> None:
    comparison = compare(base, other, training={"micro_batch_size": 4})
    assert comparison.warnings == () and comparison.recipes[1].verdict == "within"


def test_a_default_global_batch_follows_from_the_ranks(compare) -> None:
    comparison = compare({}, {}, training={"global_batch_size": None}, layout={"data": 4})
    assert comparison.warnings == ()


def test_pairs_of_different_seeds_have_different_sample_orders(write_run) -> None:
    folders = [
        write_run(name, [4.0], validations={1: 2.0}, recipe=name, config={"training": {"seed": seed}})
        for name, seed in (("bf16", 1), ("fp8", 2))
    ]
    row = compare_runs(load_runs(folders)).recipes[1]
    assert (row.verdict, row.other_data) == ("not decided", ("seed",))


def test_fields_missing_in_records_are_no_difference(write_run) -> None:
    configs = {"bf16": {"data": {}}, "fp8": {"data": {"data_path": ["x"], "seq_length": 64}}}
    folders = [
        write_run(name, [4.0], validations={1: 2.0}, recipe=name, config=config) for name, config in configs.items()
    ]
    assert compare_runs(load_runs(folders)).recipes[1].other_data == ()
