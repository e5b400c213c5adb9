"""Runs of several seeds are grouped into recipes, and recipes into pairs."""

from __future__ import annotations

import re

import pytest

from megafp8.analysis import tables
from megafp8.analysis.compare import compare_runs
from megafp8.analysis.pairing import group_runs, pairs_of, seed_of
from megafp8.analysis.runs import load_runs
from megafp8.errors import DataError

GAPS = {"fp8": {1: 0.01, 2: 0.03, 3: 0.02}, "fp4": {1: 0.1, 2: 0.1, 3: 0.1}}


@pytest.fixture
def write_seeds(write_run):
    """Writes a recipe's runs with these final validation losses by seed."""

    def write(name: str, losses: dict[int, float], micro_batch_size: int = 4, num_threads: int = 1, recipe: str = ""):
        return [
            write_run(
                f"{name}/seed{seed}",
                [5.0, loss],
                validations={1: 6.0, 2: loss},
                recipe=recipe or name,
                config={"training": {"seed": seed, "micro_batch_size": micro_batch_size, "num_threads": num_threads}},
            )
            for seed, loss in losses.items()
        ]

    return write


@pytest.fixture
def three_recipes(write_seeds):
    base = {1: 2.0, 2: 4.0, 3: 3.0}
    folders = write_seeds("bf16", base)
    for name, gaps in GAPS.items():
        folders += write_seeds(name, {seed: base[seed] * (1 + gap) for seed, gap in gaps.items()}, num_threads=2)
    return load_runs(reversed(folders))


def test_runs_that_differ_in_the_seed_are_one_recipe(three_recipes) -> None:
    recipes = group_runs(three_recipes)
    assert [recipe.name for recipe in recipes] == ["fp4", "fp8", "bf16"]
    assert all([seed_of(run) for run in recipe.runs] == [1, 2, 3] for recipe in recipes)


def test_gaps_are_taken_within_a_seed(three_recipes) -> None:
    """Between seeds the baseline's losses differ by 100%. None of that is in the gaps."""
    comparison = compare_runs(three_recipes, baseline="bf16", bound_fraction=0.06)
    rows = {row.name: row for row in comparison.recipes}
    assert rows["fp8"].gaps_fraction == pytest.approx((0.01, 0.03, 0.02))
    assert rows["fp8"].gap.mean == pytest.approx(0.02)
    assert rows["fp8"].gap.high == pytest.approx(0.02 + 4.3027 * 0.01 / 3**0.5, rel=1e-4)
    assert rows["fp8"].training_gap.mean == pytest.approx(0.02)
    assert rows["fp8"].validation_loss == pytest.approx((2.02 + 4.12 + 3.06) / 3)
    assert (rows["bf16"].verdict, rows["fp8"].verdict, rows["fp4"].verdict) == ("", "within", "beyond")
    assert (rows["fp8"].seeds, comparison.warnings) == ((1, 2, 3), ())
    assert compare_runs(three_recipes, baseline="bf16", bound_fraction=0.03).recipes[1].verdict == "not decided"


def test_a_run_names_the_baseline_recipe_too(three_recipes) -> None:
    assert compare_runs(three_recipes, baseline="fp8/seed2").baseline == "fp8"


def test_a_seed_missing_in_the_baseline_is_omitted_and_reported(write_seeds) -> None:
    runs = load_runs([*write_seeds("bf16", {1: 2.0, 2: 4.0}), *write_seeds("fp8", {2: 4.2, 3: 9.0})])
    comparison = compare_runs(runs)
    assert comparison.recipes[1].seeds == (2,)
    assert comparison.recipes[1].gaps_fraction == pytest.approx((0.05,))
    assert comparison.warnings[0] == "fp8/seed3: the baseline bf16 has no run of that seed, so left out"
    assert comparison.warnings[1].startswith("fp8 has 1 of the 2 seeds of bf16: its gap is one of pairs")
    assert len(comparison.warnings) == 2


def test_two_single_runs_of_other_seeds_are_compared_with_a_warning(write_seeds) -> None:
    comparison = compare_runs(load_runs([*write_seeds("bf16", {1: 2.0}), *write_seeds("fp8", {2: 2.1})]))
    assert comparison.recipes[1].gaps_fraction == pytest.approx((0.05,))
    assert "fp8/seed2 has seed 2, bf16/seed1 1: they are no pair" in comparison.warnings


def test_another_micro_batch_is_another_recipe_but_other_threads_are_not(write_seeds) -> None:
    losses = {1: 2.0, 2: 4.0}
    folders = [*write_seeds("bf16", losses), *write_seeds("control", losses, micro_batch_size=2)]
    recipes = group_runs(load_runs(folders))
    assert [recipe.name for recipe in recipes] == ["bf16", "control"]
    assert len(pairs_of(*recipes)) == 2
    assert "control: training.micro_batch_size: 4 -> 2" in compare_runs(load_runs(folders)).differences


@pytest.mark.parametrize("is_reversed", [False, True])
def test_seeds_of_namesake_folders_stay_apart(write_seeds, is_reversed: bool) -> None:
    """The first folder lacks a seed, which the second one has. A seed of only one folder stays with its folder."""
    folders = write_seeds("exp1/fp8", {1: 2.0, 3: 2.0, 4: 2.0}, recipe="fp8")
    folders += write_seeds("exp2/fp8", {2: 4.0, 1: 4.0, 3: 4.0}, recipe="fp8")
    base = write_seeds("bf16", {1: 2.0, 2: 2.0, 3: 2.0, 4: 2.0})
    runs = load_runs([*base, *(folders[::-1] if is_reversed else folders)])
    seeds = {recipe.name: [seed_of(run) for run in recipe.runs] for recipe in group_runs(runs)}
    assert seeds.pop("exp1/fp8") == [1, 3, 4] and seeds.pop("exp2/fp8") == [1, 2, 3]
    (name,) = seeds
    assert name.endswith("/bf16") and compare_runs(runs, baseline="bf16").baseline == name
    with pytest.raises(DataError, match="baseline 'fp8' may be exp[12]/fp8 or exp[12]/fp8"):
        compare_runs(runs, baseline="fp8")


def test_seeds_of_two_folders_are_one_recipe_where_none_is_in_both(write_seeds) -> None:
    folders = write_seeds("fp8", {1: 2.0, 2: 2.0}) + write_seeds("more", {3: 2.0}, recipe="fp8")
    (recipe,) = group_runs(load_runs(folders))
    assert [seed_of(run) for run in recipe.runs] == [1, 2, 3] and recipe.name == "fp8"


def test_a_repeated_run_is_paired_with_itself(write_run) -> None:
    runs = load_runs([write_run(name, [1.0], validations={1: 1.0}) for name in ("a", "b")])
    assert [recipe.name for recipe in group_runs(runs)] == ["a", "b"]


def test_tables_have_recipes_and_runs(three_recipes) -> None:
    comparison = compare_runs(three_recipes, baseline="bf16", bound_fraction=0.06)
    text, markdown = tables.to_text(comparison), tables.to_markdown(comparison)
    assert re.search(r"fp8 +3 +3.0667 +\+2.00% +-0.48% to \+4.48% +within ", text) and "fp8/seed2" in text
    assert "bound 6%" in text and "within: the complete 95% interval" in text
    assert sum(line.startswith("|") for line in markdown.splitlines()) == 3 * 2 + 3 + 2 + 9


def test_unknown_baselines_are_reported(three_recipes) -> None:
    with pytest.raises(DataError, match="none of the runs; they are fp4, fp8, bf16"):
        compare_runs(three_recipes, baseline="fp16")
