"""The report of a study on points with known losses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from megafp8.analysis.power_laws import Estimate
from megafp8.analysis.scaling_laws import BOTH, COMPUTE, PARAMETERS, CellRow, gap_rows, mean_of_means
from megafp8.analysis.scaling_page import render_page, sweep_lines, swept_axes
from megafp8.analysis.scaling_report import (
    agreement_text,
    analyse,
    count_text,
    headline,
    method,
    tables,
    to_markdown,
    to_text,
    warnings,
)
from megafp8.analysis.study_points import Point, StudyPoints, load_points
from megafp8.errors import DataError

SIZES = (50_000, 100_000, 200_000, 400_000, 800_000)
SHIFT = 0.6


def point(parameters: int, recipe: str = "bf16", seed: int = 1, loss: float = 1.0, **fields) -> Point:
    tokens = fields.pop("tokens", 10 * parameters)
    return Point(**{
        "label": f"{parameters}-{recipe}-{seed}",
        "choice": {"size": str(parameters), "recipe": recipe, "seed": str(seed)},
        "recipe": recipe,
        "arithmetic": "bf16" if recipe == "bf16" else f"{recipe}, emulated", "device": "EPYC",
        "layout": {"data": 1}, "world_size": 1, "seed": seed,
        "parameters": parameters, "tokens": tokens, "flops": 6.0 * parameters * tokens, "loss": loss,
        "validation_tokens": 1000, "tokens_per_second": 100.0, "model_tflops_per_device": None, "mfu_fraction": None,
        "memory_peak_bytes": None, "settings": f"{parameters}-{tokens}-{recipe}",
    } | fields)  # fmt: skip


def law(flops: float) -> float:
    return 1.0 + 0.6 * (flops / 1e12) ** -0.2


def study_of(sizes=SIZES, seeds=(1, 2, 3), recipes=("bf16", "fp8"), **fields) -> StudyPoints:
    rng = np.random.default_rng(0)
    points = []
    for size in sizes:
        for seed in seeds:
            common = 0.01 * rng.standard_normal()
            for recipe in recipes:
                factor = SHIFT if recipe == "fp8" else 1.0
                loss = law(factor * 60.0 * size * size) * np.exp(common + 0.001 * rng.standard_normal())
                points.append(point(size, recipe, seed, loss, **fields))
    return StudyPoints(name="planted", points=tuple(points))


@pytest.fixture(scope="module")
def report():
    return analyse(study_of())


def test_the_shift_is_found_with_its_interval(report) -> None:
    axis = report.axis(COMPUTE)
    ((recipe, factor),) = axis.factors
    assert recipe == "fp8" and factor.low < SHIFT < factor.high and factor.high < 0.8
    middle = axis.shifts[1]
    assert middle.effective.low < SHIFT < middle.effective.high
    exact = law(SHIFT * middle.x) / law(middle.x) - 1
    assert middle.gap.low < exact < middle.gap.high and middle.gap.low > 0
    assert "fp8 needs more compute for the same loss." in headline(report)


def test_laws_have_intervals_and_residuals(report) -> None:
    for row in report.axis(COMPUTE).laws:
        assert row.floor.low < 1.0 < row.floor.high and row.exponents[0].low < 0.2 < row.exponents[0].high
        assert row.num_cells == 5 and 0 < row.worst_residual < 0.02


def test_a_law_does_not_depend_on_seeds_that_only_others_have() -> None:
    points = study_of().points
    fewer = [point for point in points if point.seed < 3]
    more = [point for point in points if point.seed < 3 or point.recipe == "bf16"]
    axes = [analyse(StudyPoints(name="seeds", points=tuple(each))).axis(COMPUTE) for each in (fewer, more)]
    assert axes[0].laws[1] == axes[1].laws[1] and axes[0].laws[1].floor.low is not None
    assert axes[0].laws[0] != axes[1].laws[0] and axes[0].differences != axes[1].differences


def test_a_law_over_parameters_is_fitted_too_and_one_of_both_is_not(report) -> None:
    assert report.axis(PARAMETERS) is not None and report.axis(BOTH) is None
    (note,) = report.notes
    assert note.startswith("Not fitted: the law in N (parameters) and D (tokens). It needs at least 3 sizes and 3 run")


def test_gaps_are_students_of_the_pairs(report) -> None:
    pairs = {cell.recipe: np.array(cell.losses) for cell in report.cells if cell.parameters == SIZES[2]}
    ratios = pairs["fp8"] / pairs["bf16"] - 1
    (row,) = [row for row in report.gaps if row.parameters == SIZES[2]]
    expected = stats.ttest_1samp(ratios, 0).confidence_interval(0.95)
    assert (row.gap.low, row.gap.high) == pytest.approx((expected.low, expected.high))
    assert row.gap.value == pytest.approx(ratios.mean()) and row.num_pairs == 3


def with_gap_of_size(factors: dict[int, float]):
    """The report of a study whose second recipe has a given gap at each size."""
    rng, points = np.random.default_rng(9), study_of(recipes=("bf16",)).points
    twins = [
        dataclasses.replace(
            one, recipe="fp8", loss=one.loss * (factors[one.parameters] + 0.001 * rng.standard_normal())
        )
        for one in points
    ]
    return analyse(StudyPoints(name="gaps", points=(*points, *twins)))


def test_gaps_that_agree_over_sizes_are_pooled() -> None:
    report = with_gap_of_size(dict.fromkeys(SIZES, 1.01))
    *rows, overall = report.gaps
    assert overall.parameters is None and overall.num_pairs == 15
    assert overall.gap.value == pytest.approx(np.mean([row.gap.value for row in rows]))
    assert overall.gap.high - overall.gap.low < max(row.gap.high - row.gap.low for row in rows)
    assert "pooled" in tables(report)[0].note and "not pooled" not in tables(report)[0].note


def test_gaps_that_differ_by_size_are_not_pooled() -> None:
    report = with_gap_of_size({size: 1.01 + 0.005 * index for index, size in enumerate(SIZES)})
    assert [row.parameters for row in report.gaps] == list(SIZES)
    assert "The gap of fp8 differs by size, from +0.93% to +3.11%" in headline(
        report
    ) and "it is not pooled" in headline(report)
    assert "not pooled" in tables(report)[0].note
    assert not report.agreements[0].may_pool and json.loads(report.to_json())["agreements"][0]["num_sizes"] == 5


def agreement_of(*sizes: list[float]):
    """Gap rows and agreement of a recipe whose pairs have these gaps, size by size."""
    cells = [
        CellRow(
            recipe=recipe, options={}, parameters=10 * (number + 1), tokens=1000, flops=1.0, losses=tuple(losses),
            seeds=tuple(range(len(losses))), mean=float(np.mean(losses)), spread=None, is_best=True,
        )
        for number, gaps in enumerate(sizes)
        for recipe, losses in (("bf16", [3.0] * len(gaps)), ("fp8", [3.0 * (1 + gap) for gap in gaps]))
    ]  # fmt: skip
    rows, (agreement,) = gap_rows(cells, ["bf16", "fp8"])
    return [row for row in rows if row.parameters is None], agreement


TIGHT, FAR = [0.001, 0.0011, 0.0009, 0.001, 0.0012], [0.08, 0.081, 0.079, 0.08, 0.0805]


@pytest.mark.parametrize("sizes", [(TIGHT, FAR, [0.02]), ([0.001], [0.08]), (TIGHT, [0.08]), (TIGHT, FAR)])
def test_without_a_test_that_agrees_nothing_is_pooled(sizes) -> None:
    pooled, agreement = agreement_of(*sizes)
    assert not pooled and not agreement.may_pool
    assert (agreement.p_value is None) == (agreement.num_tested < 2) and "not pooled" in agreement_text(agreement)
    report = analyse(StudyPoints(name="gaps", points=tuple(
        point(10**5 * (number + 1), recipe=recipe, seed=seed, loss=3.0 * (1 + gap * (recipe == "fp8")))
        for number, gaps in enumerate(sizes) for seed, gap in enumerate(gaps) for recipe in ("bf16", "fp8")
    )))  # fmt: skip
    assert "not pooled" in headline(report) and "+8.0" in headline(report)


def test_more_settings_give_no_better_gap() -> None:
    """All losses are noise of one distribution: the best of eight means alone would be 1.4 deviations lower."""
    draws, found = np.random.default_rng(5), []
    for _ in range(200):
        study = StudyPoints(name="settings", points=tuple(
            point(10**5, recipe=recipe, seed=seed, loss=3.0 + draws.normal(scale=0.01), settings=f"lr{number}")
            for recipe, settings in (("bf16", 1), ("fp8", 8)) for number in range(settings) for seed in range(3)
        ))  # fmt: skip
        report = analyse(study)
        found.append(report.gaps[0].gap.value)
        best = min(cell.mean for cell in report.cells if cell.recipe == "fp8")
        assert best == next(cell.mean for cell in report.cells if cell.recipe == "fp8" and cell.is_best)
    error = np.std(found) / len(found) ** 0.5
    assert abs(np.mean(found)) < 3 * error and error < 3e-4
    one_seed = StudyPoints(name="settings", points=tuple(
        point(10**5, recipe=recipe, loss=3.0 + 0.01 * number, settings=f"lr{number}")
        for recipe, settings in (("bf16", 1), ("fp8", 2)) for number in range(settings)
    ))  # fmt: skip
    assert any("the gap favours it" in note for note in analyse(one_seed).notes)


def test_a_size_of_one_pair_is_left_out_of_the_pool_and_named() -> None:
    (pooled,), agreement = agreement_of(TIGHT, TIGHT[::-1], [0.08])
    assert agreement.may_pool and (agreement.num_sizes, agreement.num_tested, pooled.num_pairs) == (3, 2, 10)
    assert pooled.gap.value == pytest.approx(np.mean(TIGHT)) and pooled.gap.high < 0.002
    assert "without 1 of 3 sizes, which have a single pair" in agreement_text(agreement)


def test_a_single_size_is_its_own_pool() -> None:
    (pooled,), agreement = agreement_of([0.01])
    assert agreement.may_pool and pooled.num_pairs == 1 and pooled.gap.low is None


@pytest.mark.parametrize(
    ("sizes", "spreads", "least"),
    [((5, 5, 5), (1, 1, 1), 0.93), ((2, 2), (1, 1), 0.93), ((3, 3, 3), (1, 3, 0.5), 0.92), ((2, 5), (5, 1), 0.87)],
)
def test_the_pooled_interval_covers_groups_of_different_variances(sizes, spreads, least: float) -> None:
    generator, num_trials, num_covered = np.random.default_rng(5), 2000, 0
    for _ in range(num_trials):
        groups = [spread * generator.standard_normal(size) for size, spread in zip(sizes, spreads, strict=True)]
        estimate = mean_of_means(groups)
        num_covered += estimate.low <= 0 <= estimate.high
    assert least <= num_covered / num_trials <= 0.985


def test_a_missing_shift_is_not_reported_as_one() -> None:
    points = study_of(recipes=("bf16",)).points
    rng = np.random.default_rng(9)
    twins = [
        dataclasses.replace(one, recipe="fp8", loss=one.loss * np.exp(0.001 * rng.standard_normal())) for one in points
    ]
    text = headline(analyse(StudyPoints(name="same", points=(*points, *twins))))
    assert "no shift of the scaling law is found" in text


def test_a_grid_of_sizes_and_tokens_gives_a_law_of_both() -> None:
    points = [
        point(size, seed=seed, tokens=tokens, loss=1 + 0.5 * (size / 1e5) ** -0.3 + 0.5 * (tokens / 1e6) ** -0.4)
        for size in SIZES[:4] for tokens in (200_000, 1_000_000, 5_000_000) for seed in (1, 2)
    ]  # fmt: skip
    report = analyse(StudyPoints(name="grid", points=tuple(points)))
    (row,) = report.axis(BOTH).laws
    assert [one.value for one in row.exponents] == pytest.approx([0.3, 0.4], rel=1e-2)
    assert report.axis(PARAMETERS) is None and "several numbers of tokens" in report.notes[0]
    assert report.axis(COMPUTE).laws[0].num_cells < 12  # the frontier only


def test_too_few_sizes_have_no_law() -> None:
    report = analyse(study_of(SIZES[:3]))
    assert report.axes == () and "Not fitted: the law over compute. It needs 4 cells; bf16 has 3." in report.notes
    assert len(report.gaps) == 3  # of the sizes, which differ


def test_one_seed_has_no_intervals() -> None:
    report = analyse(study_of(seeds=(1,)))
    assert report.axis(COMPUTE).laws[0].floor.low is None and report.gaps[0].gap.low is None
    assert "of compute in bf16, without an interval." in headline(report)
    assert any("The laws over compute have no intervals" in note for note in report.notes)


def test_the_best_of_a_sweep_represents_its_size() -> None:
    points = [
        point(50_000, seed=seed, loss=loss + 0.01 * seed, settings=lr, choice={"lr": f"lr{lr}", "seed": str(seed)})
        for lr, loss in (("1e-3", 2.1), ("3e-3", 2.0), ("9e-3", 2.2)) for seed in (1, 2)
    ]  # fmt: skip
    report = analyse(StudyPoints(name="sweep", points=tuple(points)))
    cells = report.cells
    assert [(dict(cell.options), cell.is_best) for cell in cells] == [
        ({"lr": "lr3e-3"}, True), ({"lr": "lr1e-3"}, False), ({"lr": "lr9e-3"}, False),
    ]  # fmt: skip
    assert cells[0].mean == pytest.approx(2.015) and cells[0].spread == pytest.approx(np.std([2.01, 2.02], ddof=1))
    assert swept_axes(report) == ["lr"]
    (line,) = sweep_lines(report, "lr").values()
    values, means, spreads = zip(*sorted(line), strict=True)
    assert values == (1e-3, 3e-3, 9e-3) and means == pytest.approx([2.115, 2.015, 2.215])
    assert spreads == pytest.approx([cells[0].spread] * 3)
    assert "<h2>Swept flags</h2>" in render_page(report)


def test_one_lucky_seed_does_not_decide_a_sweep() -> None:
    study = study_of()
    lucky = point(SIZES[1], "fp8", loss=0.1, settings="lucky", choice={"lr": "9e-3"})
    report = analyse(dataclasses.replace(study, points=(*study.points, lucky)))
    best = [cell for cell in report.cells if cell.is_best]
    assert len(best) == 10 and all(len(cell.seeds) == 3 for cell in best)
    assert report.axis(COMPUTE).laws[1].floor.low is not None
    (note,) = [note for note in report.notes if note.startswith("Left out, because another")]
    assert "fp8, 9e-3, 100,000 parameters, 1,000,000 tokens (0.1000 with 1 of 3 seeds, not " in note
    assert note in warnings(report)


def test_the_page_has_the_number_of_fits(report) -> None:
    assert method(report).startswith("Jackknife of 15 fits") and "Jackknife of 15 fits" in render_page(report)
    assert "no intervals" in method(analyse(study_of(seeds=(1,))))


def test_json_has_no_infinity(report) -> None:
    axis = report.axes[0]
    endless = dataclasses.replace(axis.shifts[0], effective=Estimate(float("inf"), 0.5, float("nan")))
    text = dataclasses.replace(report, axes=(dataclasses.replace(axis, shifts=(endless,)),)).to_json()
    (shift,) = json.loads(text)["axes"][0]["shifts"]
    assert "Infinity" not in text and "NaN" not in text
    assert shift["effective"] == {"value": None, "low": 0.5, "high": None}


def test_speed_compares_the_fastest_layouts() -> None:
    def run(recipe: str, world_size: int, speed: float, **layout: int) -> Point:
        fields = {"world_size": world_size, "layout": layout, "tokens_per_second": speed, "settings": f"{layout}"}
        return point(50_000, recipe, **fields)

    points = (
        run("bf16", 1, 100.0, tensor=1), run("bf16", 4, 300.0, tensor=4), run("bf16", 4, 360.0, tensor=1, data=4),
        run("fp8", 1, 150.0, tensor=1), run("fp8", 4, 540.0, data=4),
    )  # fmt: skip
    report = analyse(StudyPoints(name="speed", points=points))
    shown = [(row.recipe, row.world_size, row.layout, row.efficiency, row.speedup) for row in report.speeds]
    assert shown == [
        ("bf16", 1, "one rank", 1.0, 1.0), ("fp8", 1, "one rank", 1.0, 1.5),
        ("bf16", 4, "data 4", pytest.approx(0.9), 1.0), ("fp8", 4, "data 4", pytest.approx(0.9), pytest.approx(1.5)),
    ]  # fmt: skip
    assert "speed over devices" in render_page(report).lower()


def test_an_unknown_baseline() -> None:
    with pytest.raises(DataError, match="baseline 'mxfp8' is none of the study's recipes bf16, fp8"):
        analyse(study_of(), baseline="mxfp8")


# ---- as text ------------------------------------------------------------------------------------------------------


def test_the_page_is_self_contained(report) -> None:
    page = render_page(report)
    assert page.count("<svg") == 2 and "Swept flags" not in page and page.rstrip().endswith("</html>")
    assert all(word not in page for word in ("<script", "<img", "src=", "@import", "url(http"))
    for table in tables(report):
        assert f"<h2>{table.title}</h2>" in page
    assert len(page) < 400_000
    assert render_page(report) == page


def test_texts_of_a_study_are_escaped() -> None:
    page = render_page(analyse(StudyPoints(name="a<b>", points=(point(50_000, "<i>"),))))
    assert "<b>" not in page and "<i>" not in page and "a&lt;b&gt;" in page


def test_markdown_tables_are_even(report) -> None:
    blocks = [block for block in to_markdown(report, "laws.svg").split("\n\n") if block.startswith("|")]
    assert len(blocks) == len(tables(report))
    for block in blocks:
        assert len({line.count("|") for line in block.splitlines()}) == 1


def test_the_notes_of_tables_need_no_escapes(report) -> None:
    assert "\\" not in to_markdown(report, "laws.svg")


def test_a_terminal_gets_the_same_tables(report) -> None:
    text = to_text(report)
    assert headline(report) in text and all(table.title in text for table in tables(report))


def test_json_is_strict_and_has_no_replicates(report) -> None:
    plain = json.loads(report.to_json(), parse_constant=pytest.fail)
    assert plain["axes"][0]["factors"][0][0] == "fp8" and "fits" not in plain["axes"][0]


def test_emulation_and_missing_runs_are_reported(report) -> None:
    assert any("emulated" in text for text in warnings(report))
    partial = dataclasses.replace(study_of(SIZES[:2]), missing=("x (failed)",))
    assert "1 of 13 runs is not done: x (failed)" in warnings(analyse(partial))
    assert headline(analyse(partial)).endswith("1 of 13 runs is not done.")


# ---- the committed study ------------------------------------------------------------------------------------------


def test_the_committed_report_matches_its_points() -> None:
    folder = Path(__file__).resolve().parents[3] / "docs/reports/stdlib_cpu"
    study, published = load_points(folder / "points.json"), json.loads((folder / "report.json").read_text())
    report = analyse(study)
    assert study.missing == () and len(study.points) == published["num_runs"]
    assert len({point.parameters for point in study.points}) >= 5 and len(report.recipes) == 2
    assert all(len(cell.seeds) >= 3 for cell in report.cells)
    plain = json.loads(report.to_json())
    assert plain["cells"] == published["cells"] and plain["agreements"] == published["agreements"]
    for row, written in zip(plain["gaps"], published["gaps"], strict=True):
        assert row["num_pairs"] == written["num_pairs"] and row["gap"] == pytest.approx(written["gap"])
    assert tables(report)[0].note in (folder / "report.md").read_text()
    for axis, written in zip(report.axes, published["axes"], strict=True):
        for law, row in zip(axis.laws, written["laws"], strict=True):
            assert law.exponents[0].value == pytest.approx(row["exponents"][0]["value"], rel=0.01)
            assert law.worst_residual == pytest.approx(row["worst_residual"], rel=0.01)
        assert dataclasses.asdict(axis.factors[0][1]) == pytest.approx(written["factors"][0][1], rel=0.01)


@pytest.mark.parametrize(("number", "text"), [(999_999, "1M"), (1_230_000, "1.23M"), (999, "999"), (12, "12")])
def test_counts_are_rounded_before_their_letter(number: float, text: str) -> None:
    assert count_text(number) == text
