"""The structure of the HTML pages: what scrolls, how large labels are, and what is left out."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Optional

import pytest

from megafp8.analysis.comparison_page import publish_comparison
from megafp8.analysis.html import TEMPLATES
from megafp8.analysis.plot_comparison import WIDTH_INCHES, legend_shape
from megafp8.analysis.scaling_page import render_page
from megafp8.analysis.scaling_report import analyse
from megafp8.analysis.study_points import load_points
from megafp8.resilience.run_state import RUN_STATE_FILE, RunState
from megafp8.utils.process import Process

MIN_LABEL_PIXELS = 11
REM_PIXELS = 16
VOID = {"meta", "link", "br", "img"}
POINTS = Path(__file__).resolve().parents[3] / "docs/reports/stdlib_cpu/points.json"


class Page(HTMLParser):
    """The classes of the elements around each table and figure of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.text = text
        self.stack: list[tuple[str, str]] = []
        self.around: list[tuple[str, set[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Optional[str]]]) -> None:
        if tag in ("table", "svg"):
            self.around.append((tag, {name for _, classes in self.stack for name in classes.split()}))
        if tag not in VOID:
            self.stack.append((tag, dict(attrs).get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        while self.stack and self.stack.pop()[0] != tag:
            pass

    @property
    def titles(self) -> list[str]:
        return re.findall(r"<h2>(.*?)</h2>", self.text)


@pytest.fixture(scope="module")
def comparison_page(write_shared_run, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Two recipes with two seeds each and everything measured."""
    fields = {"memory_peak_bytes": 2**30, "grad_norm": 1.0}
    folders = [
        write_shared_run(
            f"{name}/seed{seed}", [4.0, 3.5, 3.0], validations={2: 3.5, 3: 3.0 + seed / 100}, recipe=name,
            config={"training": {"seed": seed}}, step_fields=fields,
        )
        for name in ("bf16", "fp8") for seed in (1, 2)
    ]  # fmt: skip
    out = tmp_path_factory.mktemp("comparison")
    publish_comparison(folders, output_folder=out)
    return Page((out / "report.html").read_text())


@pytest.fixture(scope="module")
def scaling_page() -> Page:
    return Page(render_page(analyse(load_points(POINTS))))


def min_width_pixels(selector: str) -> float:
    """The minimum width that the style sheet gives to the figures of a selector."""
    style = (TEMPLATES / "base.html.jinja").read_text()
    found = re.search(rf"^[^@\n]*{re.escape(selector)}[^\n]*min-width: (\d+)rem", style, re.MULTILINE)
    assert found is not None
    return REM_PIXELS * int(found[1])


def check_frames(page: Page, num_figures: int) -> None:
    assert sum(tag == "svg" for tag, _ in page.around) == num_figures
    assert all("scroll" in classes for _, classes in page.around)
    svgs = re.findall(r"<svg .*?</svg>", page.text, re.DOTALL)
    for (_, classes), svg in zip([each for each in page.around if each[0] == "svg"], svgs, strict=True):
        selector = next((f".{name} svg" for name in ("narrow", "panels") if name in classes), "figure svg")
        found = re.search(r'viewBox="0 0 ([\d.]+)', svg)
        assert found is not None
        sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:[a-z]+ )*([\d.]+)px", svg)]
        assert sizes and min(sizes) * min_width_pixels(selector) / float(found[1]) >= MIN_LABEL_PIXELS


def test_tables_and_figures_scroll_in_frames_and_labels_stay_legible(comparison_page: Page, scaling_page: Page) -> None:
    check_frames(comparison_page, num_figures=12)
    check_frames(scaling_page, num_figures=2)


def test_a_figure_is_there_for_wide_and_for_narrow_screens(comparison_page: Page) -> None:
    shown = [classes & {"wide", "narrow"} for tag, classes in comparison_page.around if tag == "svg"]
    assert shown == [{"wide"}, {"narrow"}] * 6
    ids = re.findall(r'\bid="([^"]+)"', comparison_page.text)
    assert len(ids) == len(set(ids))


def test_figures_and_columns_without_data_are_left_out(write_run, tmp_path) -> None:
    folders = [write_run(name, [4.0, 3.0], recipe=name) for name in ("bf16", "fp8")]
    process = Process(host="elsewhere", place="elsewhere", pid=1, started=0)
    state = RunState(state="stopped", world_size=1, process=process, started_at=0.0, updated_at=0.0)
    for folder in folders:
        (folder / RUN_STATE_FILE).write_text(json.dumps(dataclasses.replace(state, step=2).to_plain()))
    publish_comparison(folders, include_unfinished=True, output_folder=tmp_path / "out")
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert page.titles == ["Training loss", "What the verdicts mean", "Speed and memory", "What was run"]
    header = page.text[page.text.index("<thead>") : page.text.index("</thead>")]
    assert re.findall(r"<th[^>]*>([^<]*)</th>", header) == ["recipe", "verdict", "seeds", "tokens/s", "speed"]
    assert "peak memory" not in page.text


def test_gaps_have_a_panel_only_with_something_to_compare(comparison_page: Page, write_run, tmp_path) -> None:
    publish_comparison([write_run("bf16", [4.0, 3.0], validations={2: 3.0})], output_folder=tmp_path / "alone")
    alone = (tmp_path / "alone" / "report.html").read_text()
    assert "gap to bf16 (%)" not in alone and "Gap to bf16" not in alone
    assert "gap to bf16 (%)" in comparison_page.text and "Gap to bf16" in comparison_page.titles


def test_a_loss_that_is_not_finite_is_named(write_run, tmp_path) -> None:
    losses = {"bf16": 3.0, "fp8": float("nan")}
    folders = [write_run(name, [4.0, 3.0], validations={2: loss}, recipe=name) for name, loss in losses.items()]
    publish_comparison(folders, output_folder=tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<td>not finite</td>" in text and "the loss is not finite" in text and "+nan" not in text


def test_tables_of_a_study_have_no_empty_column(scaling_page: Page) -> None:
    assert "MFU" not in scaling_page.text and "tokens/s" in scaling_page.text
    study = load_points(POINTS)
    alone = dataclasses.replace(study, points=tuple(point for point in study.points if point.recipe == "bf16"))
    titles = Page(render_page(analyse(alone))).titles
    assert "Gap to bf16" not in titles and "Speed" in titles


def test_a_study_of_one_size_has_its_point_on_the_axes() -> None:
    study = load_points(POINTS)
    size = study.points[0].parameters
    one = dataclasses.replace(study, points=tuple(point for point in study.points if point.parameters == size))
    page = render_page(analyse(one))
    assert page.count("<svg") == 2 and "lines are the fitted laws" not in page


@pytest.mark.parametrize(
    ("labels", "width_inches", "shape"),
    [
        (["bf16", "fp8"], WIDTH_INCHES, (2, 1)),
        (["a" * 30] * 5, WIDTH_INCHES, (2, 3)),
        (["a" * 30] * 5, 4.6, (1, 5)),
        (["a" * 300], 4.6, (1, 1)),
    ],
)
def test_a_legend_fits_its_figure(labels: list[str], width_inches: float, shape: tuple[int, int]) -> None:
    assert legend_shape(labels, width_inches) == shape
