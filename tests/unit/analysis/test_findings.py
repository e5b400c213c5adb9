"""One sentence for each case: what the numbers and their intervals show."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

import pytest

from megafp8.analysis import tables
from megafp8.analysis.compare import Comparison, RecipeRow, compare_runs
from megafp8.analysis.comparison_page import render_page
from megafp8.analysis.findings import Difference, difference_sentences, headline
from megafp8.analysis.percent import percent, rounded, rounded_up, signed
from megafp8.analysis.runs import LoadedRun, Unfinished, load_runs

NAN = float("nan")
APART = "cannot be told apart with 3 seeds; a difference in validation loss above"
SEEDS = "in validation loss with 3 seeds."
ONE_SEED = "One seed each: no interval; the difference in validation loss from bf16 is"


def difference(name: str, low: Optional[float], high: Optional[float], mean: float = 0.0, n: int = 3) -> Difference:
    middle = mean if low is None or high is None else (low + high) / 2
    return Difference(name=name, mean=middle, low=low, high=high, sample=f"with {n} seeds")


@pytest.mark.parametrize(
    ("differences", "sentences"),
    [
        (
            [difference("fp8", -0.001, 0.00395)],
            [f"fp8 and bf16 {APART} 0.4% is excluded."],
        ),
        (
            [difference("fp8", -0.0049, 0.001)],
            [f"fp8 and bf16 {APART} 0.49% is excluded."],
        ),
        (
            [difference("fp8", -0.001, 0.004), difference("mxfp8", -0.002, 0.001), difference("a", -0.07, 0.2, n=2)],
            [
                "a and bf16 cannot be told apart with 2 seeds; a difference in validation loss above 20% is excluded.",
                "fp8 and mxfp8 cannot be told apart from bf16 with 3 seeds; a difference in validation loss above 0.4% "
                "is excluded for each.",
            ],
        ),
        ([difference("fp8", 0.0014, 0.0064)], [f"fp8 is worse than bf16 by 0.14% to 0.64% {SEEDS}"]),
        ([difference("fp8", -0.0064, -0.002)], [f"fp8 is better than bf16 by 0.2% to 0.64% {SEEDS}"]),
        ([difference("fp8", 0.005, 0.005)], [f"fp8 is worse than bf16 by 0.5% {SEEDS}"]),
        ([difference("fp8", 0.00001, 0.0033)], [f"fp8 is worse than bf16 by up to 0.33% {SEEDS}"]),
        ([difference("fp8", 0.0, 0.0)], ["fp8 and bf16 ended with the same validation loss with 3 seeds."]),
        (
            [difference("fp8", None, None, 0.0028)],
            [f"{ONE_SEED} +0.28% (fp8)."],
        ),
        (
            [difference("fp8", None, None, 0.0028), difference("fp4", None, None, -0.011)],
            [f"{ONE_SEED} +0.28% (fp8) and -1.10% (fp4)."],
        ),
        ([], []),
    ],
)  # fmt: skip
def test_a_sentence_follows_from_the_interval(differences: list[Difference], sentences: list[str]) -> None:
    assert difference_sentences(differences, "bf16") == sentences


@pytest.fixture
def write_recipes(write_run: Callable[..., Path]) -> Callable[..., list[LoadedRun]]:
    """Writes a run for each final validation loss of a recipe, the first with seed 1."""

    def write(**losses: Sequence[float]) -> list[LoadedRun]:
        return load_runs(
            write_run(
                f"{name}/seed{seed}", [4.0] * 8, validations={8: loss}, recipe=name, config={"training": {"seed": seed}}
            )
            for name, values in losses.items() for seed, loss in enumerate(values, start=1)
        )  # fmt: skip

    return write


def stopped(recipe: str, seed: int, *, is_diverged: bool = False) -> Unfinished:
    return Unfinished(recipe=recipe, name=f"{recipe}/seed{seed}", reason="it stopped", is_diverged=is_diverged)


TOLD_APART = "fp8 and bf16 cannot be told apart with 2 seeds; a difference in validation loss above 12.71% is excluded."


@pytest.mark.parametrize(
    ("losses", "unfinished", "text"),
    [
        ({"bf16": [2, 2], "fp8": [2.02, 1.98]}, [], TOLD_APART),
        ({"bf16": [2, 2], "fp8": [2.02, NAN]}, [], "fp8 diverged in 1 of 2 runs."),
        ({"bf16": [2], "fp8": [NAN]}, [], "fp8 diverged."),
        ({"bf16": [2, 2], "fp8": [2, 2]}, [stopped("fp8", 3, is_diverged=True)], "fp8 diverged in 1 of 3 runs."),
        (
            {"bf16": [2, 2], "fp8": [2.01, 2.01]}, [stopped("fp8", 3)],
            "fp8 is unfinished in 1 of 3 runs: there is no finding yet; the difference so far is +0.50%.",
        ),
        ({"bf16": [2]}, [stopped("fp8", 1)], "fp8 is unfinished: there is no finding yet."),
        (
            {"bf16": [2, 2], "fp8": [2.02, 1.98]}, [stopped("mx", 1), stopped("fp4", 1, is_diverged=True)],
            f"{TOLD_APART} fp4 diverged. mx is unfinished: there is no finding yet.",
        ),
        (
            {"bf16": [2, 2], "fp8": [2, 2], "mx": [2, 2]}, [stopped("bf16", 3)],
            "The baseline bf16 is unfinished in 1 of 3 runs: there is no finding on fp8 and mx.",
        ),
        (
            {"bf16": [2, NAN], "fp8": [2, 2]}, [],
            "The baseline bf16 diverged in 1 of 2 runs: there is no finding on fp8.",
        ),
        ({"bf16": [NAN], "fp8": [NAN]}, [], "fp8 diverged."),
        ({"bf16": [2, 2]}, [], "There is no baseline: bf16 is the only recipe."),
    ],
)  # fmt: skip
def test_the_headline_of_a_comparison(write_recipes, losses: dict, unfinished: list[Unfinished], text: str) -> None:
    comparison = compare_runs(write_recipes(**losses), unfinished=unfinished)
    assert headline(comparison) == text


def test_a_diverged_baseline_puts_no_recipe_beyond_the_bound(write_recipes) -> None:
    comparison = compare_runs(write_recipes(bf16=[2, NAN], fp8=[2, 2]))
    assert [row.verdict for row in comparison.recipes] == ["", "not decided"]


def test_recipes_without_a_pair_are_not_compared(write_recipes) -> None:
    runs = write_recipes(bf16=[2, 2], fp8=[2, 2, 2])
    comparison = compare_runs([run for run in runs if run.name in ("bf16/seed1", "bf16/seed2", "fp8/seed3")])
    assert headline(comparison) == "fp8 and bf16 cannot be compared: they have no seed in common."


def test_the_control_is_a_finding_where_nothing_else_is_compared(write_run) -> None:
    folders = [
        write_run(f"{name}/seed{seed}", [4.0], validations={1: 2.0}, config={"training": {"seed": seed, "x": name}})
        for name in ("bf16", "bf16-control") for seed in (1, 2)
    ]  # fmt: skip
    text = "bf16-control and bf16 ended with the same validation loss with 2 seeds."
    assert headline(compare_runs(load_runs(folders))) == text


def test_every_output_has_the_headline(write_recipes) -> None:
    runs = write_recipes(bf16=[2, 2], fp8=[2.02, 1.98])
    comparison = compare_runs(runs)
    for output in (tables.to_text(comparison), tables.to_markdown(comparison)):
        assert output.splitlines()[0] == TOLD_APART
    assert json.loads(tables.to_json(comparison))["headline"] == TOLD_APART
    assert f'<p class="lead">{TOLD_APART}</p>' in render_page(comparison, runs, title="a title")


def test_no_headline_is_empty() -> None:
    rows = (RecipeRow(name="bf16", seeds=(1,)), RecipeRow(name="fp8", verdict="not decided"))
    comparison = Comparison(
        baseline="bf16", bound_fraction=0.005, confidence=0.95, warmup_steps=0, recipes=rows, rows=(), differences=(),
        unfinished=(), warnings=(),
    )  # fmt: skip
    assert headline(comparison) == "fp8 and bf16 cannot be compared: they have no seed in common."


def test_percentages() -> None:
    assert [percent(0.005), signed(-0.00004), rounded(0.00512), rounded(0.004)] == ["0.5%", "+0.00%", "0.51%", "0.4%"]
    assert [rounded_up(each) for each in (0.00511, 0.0051, 0.004, 0.0)] == ["0.52%", "0.51%", "0.4%", "0%"]
