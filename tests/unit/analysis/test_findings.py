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
SEEDS = "(3 seeds, against bf16)."


def difference(name: str, low: Optional[float], high: Optional[float], mean: float = 0.0, n: int = 3) -> Difference:
    middle = mean if low is None or high is None else (low + high) / 2
    return Difference(name=name, mean=middle, low=low, high=high, sample=f"{n} seeds")


@pytest.mark.parametrize(
    ("differences", "sentences"),
    [
        ([difference("fp8", -0.001, 0.00395)], [f"No difference found: fp8 +0.15% \u00b10.25% {SEEDS}"]),
        ([difference("fp8", -0.004, 0.004)], [f"No difference found: fp8 0.00% \u00b10.40% {SEEDS}"]),
        (
            [difference("fp8", -0.001, 0.004), difference("mxfp8", -0.002, 0.001), difference("a", -0.07, 0.2, n=2)],
            [
                "No difference found: a +6.50% \u00b113.50% (2 seeds, against bf16).",
                f"No difference found: fp8 +0.15% \u00b10.25%, mxfp8 -0.05% \u00b10.15% {SEEDS}",
            ],
        ),
        ([difference("fp8", 0.0014, 0.0064)], [f"Worse: fp8 +0.39% \u00b10.25% {SEEDS}"]),
        ([difference("fp8", -0.0064, -0.002)], [f"Better: fp8 -0.42% \u00b10.22% {SEEDS}"]),
        ([difference("fp8", 0.0, 0.0)], ["Same validation loss as bf16: fp8 (3 seeds)."]),
        ([difference("fp8", None, None, 0.0028)], ["One seed, so no interval: fp8 +0.28% (against bf16)."]),
        (
            [difference("fp8", None, None, 0.0028), difference("fp4", None, None, -0.011)],
            ["One seed, so no interval: fp8 +0.28%, fp4 -1.10% (against bf16)."],
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


UNCLEAR = "No difference found: fp8 0.00% \u00b112.71% (2 seeds, against bf16)."


@pytest.mark.parametrize(
    ("losses", "unfinished", "text"),
    [
        ({"bf16": [2, 2], "fp8": [2.02, 1.98]}, [], UNCLEAR),
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
            f"{UNCLEAR} fp4 diverged. mx is unfinished: there is no finding yet.",
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
    text = "Same validation loss as bf16: bf16-control (2 seeds)."
    assert headline(compare_runs(load_runs(folders))) == text


def test_every_output_has_the_headline(write_recipes) -> None:
    runs = write_recipes(bf16=[2, 2], fp8=[2.02, 1.98])
    comparison = compare_runs(runs)
    for output in (tables.to_text(comparison), tables.to_markdown(comparison)):
        assert output.splitlines()[0] == UNCLEAR
    assert json.loads(tables.to_json(comparison))["headline"] == UNCLEAR
    assert f'<p class="lead">{UNCLEAR}</p>' in render_page(comparison, runs, title="a title")


def test_no_headline_is_empty() -> None:
    rows = (RecipeRow(name="bf16", seeds=(1,)), RecipeRow(name="fp8", verdict="not decided"))
    comparison = Comparison(
        baseline="bf16", bound_fraction=0.005, confidence=0.95, warmup_steps=0, recipes=rows, rows=(), differences=(),
        unfinished=(), warnings=(),
    )  # fmt: skip
    assert headline(comparison) == "fp8 and bf16 cannot be compared: they have no seed in common."


def test_percentages() -> None:
    assert [percent(0.005), signed(-0.00004), rounded(0.00512), rounded(0.004)] == ["0.5%", "0.00%", "0.51%", "0.4%"]
    assert [rounded_up(each) for each in (0.00511, 0.0051, 0.004, 0.0)] == ["0.52%", "0.51%", "0.40%", "0.00%"]
