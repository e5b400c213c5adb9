"""Runs that resumed with other settings than they started with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megafp8.analysis import tables
from megafp8.analysis.compare import compare_runs
from megafp8.analysis.pairing import group_runs, recipe_of, settings_key, stages_of
from megafp8.analysis.runs import load_run, load_runs
from megafp8.analysis.study_points import settings_of


@pytest.fixture
def write_resumed(write_run) -> Callable[..., Path]:
    """Writes a run of four steps, the last one after a resumption."""

    def write(name: str, before: dict[str, Any], after: dict[str, Any], **recipes: str) -> Path:
        first, last = recipes.get("first", "bf16"), recipes.get("last", "bf16")
        write_run(name, [4.0, 3.5, 3.2], recipe=first, config=before)
        return write_run(
            name, [3.0], first_step=4, resumed_from_step=3, validations={4: 3.0}, recipe=last, config=after
        )

    return write


def test_a_recipe_change_on_resume_is_reported(write_run, write_resumed) -> None:
    base = write_run("bf16", [4.0, 3.5, 3.2, 3.0], validations={4: 3.0})
    before, after = {"precision": {"fp8_format": None}}, {"precision": {"fp8_format": "hybrid"}}
    swap = write_resumed("swap", before, after, last="fp8 hybrid")
    comparison = compare_runs(load_runs([base, swap]))
    assert [row.recipe for row in comparison.recipes] == ["bf16", "bf16, then from step 4 fp8 hybrid"]
    (warning,) = comparison.warnings
    assert warning.startswith(
        "swap changed on the way, from step 4 on: bf16 -> fp8 hybrid; precision.fp8_format: None -> hybrid."
    )
    assert "then from step 4" in tables.to_text(comparison) and warning in tables.to_markdown(comparison)


@pytest.mark.parametrize("name", ["precision.precision_map", "optimizer.lr"])
def test_any_setting_change_on_resume_is_reported(write_resumed, name: str) -> None:
    section, _, setting = name.partition(".")
    run = load_run(write_resumed("a", {section: {setting: "x"}}, {section: {setting: "y"}}))
    assert recipe_of(run) == "bf16, from step 4 with other settings"
    assert stages_of(run)[1].changes == (f"{name}: x -> y",)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"training": {"seed": 1}}, {"training": {"seed": 1, "of_a_later_version": False}}),
        ({"data": {"data_path": ["1", "/a/x"]}}, {"data": {"data_path": ["1", "/b/x"]}}),
        ({"data": {"tokenizer_model": "/a/t.model"}}, {"data": {"tokenizer_model": "/b/t.model"}}),
    ],
)
def test_another_version_or_machine_is_not_a_change(write_resumed, before, after) -> None:
    run = load_run(write_resumed("a", before, after))
    assert recipe_of(run) == "bf16" and len(stages_of(run)) == 1


def test_an_evaluation_after_the_last_step_is_not_a_change(write_run) -> None:
    write_run("a", [4.0, 3.5], recipe="bf16", validations={2: 3.0})
    folder = write_run("a", [], first_step=3, resumed_from_step=2, validations={2: 2.9}, recipe="fp8 hybrid")
    assert recipe_of(load_run(folder)) == "bf16"


def test_settings_without_effect_on_numerics_are_not_a_change(write_resumed) -> None:
    before = {
        "training": {
            "seed": 1, "exit_interval": 7, "num_threads": 1, "step_timeout_s": None, "cuda_graph_evaluation": True,
        },
        "checkpoint": {"save": "a", "override_precision": False}, "logging": {"log_interval": 100},
        "data": {"num_workers": 2}, "parallel": {"distributed_timeout_minutes": 10},
    }  # fmt: skip
    after = {
        "training": {
            "seed": 1, "exit_interval": None, "num_threads": 2, "step_timeout_s": 9.0, "cuda_graph_evaluation": False,
        },
        "checkpoint": {"save": "b", "override_precision": True}, "logging": {"log_interval": 1},
        "data": {"num_workers": 0}, "parallel": {"distributed_timeout_minutes": 1},
    }  # fmt: skip
    run = load_run(write_resumed("a", before, after))
    assert len(run.stages) == 2 and len(stages_of(run)) == 1 and recipe_of(run) == "bf16"


def test_a_device_change_on_resume_is_not_another_recipe(write_run) -> None:
    write_run("a", [4.0])
    run = load_run(write_run("a", [3.0], first_step=2, resumed_from_step=1, world_size=2))
    assert recipe_of(run) == "bf16" and stages_of(run)[1].changes == ("devices: 1 x cpu -> 2 x cpu",)
    assert len(settings_key(run)) == 1


def test_a_seed_with_changed_settings_is_not_grouped_with_unchanged_ones(write_run, write_resumed) -> None:
    def config(seed: int, fp8_format: str) -> dict[str, Any]:
        return {"training": {"seed": seed}, "precision": {"fp8_format": fp8_format}}

    plain = {"validations": {4: 3.0}, "recipe": "fp8"}
    folders = [write_run(f"fp8/seed{seed}", [4.0] * 4, config=config(seed, "hybrid"), **plain) for seed in (1, 2)]
    resumed = write_resumed("fp8/seed3", config(3, "hybrid"), config(3, "hybrid"), first="fp8", last="fp8")
    changed = write_resumed("fp8/seed4", config(4, "e4m3"), config(4, "hybrid"), first="fp8", last="fp8")
    runs = load_runs([*folders, resumed, changed])
    assert [[run.name for run in recipe.runs] for recipe in group_runs(runs)] == [
        ["fp8/seed1", "fp8/seed2", "fp8/seed3"], ["fp8/seed4"],
    ]  # fmt: skip
    assert len({settings_of(run) for run in runs[:3]}) == 1 and settings_of(runs[3]) != settings_of(runs[0])
