"""Reports in a real browser: they are complete, need no network, are not blank, and fit narrow screens."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafp8.analysis.comparison_page import publish_comparison
from megafp8.analysis.scaling_page import publish_study
from megafp8.metrics.records import EvalRecord, RunRecord, StepRecord
from megafp8.metrics.sinks.jsonl import JsonlSink

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
RECIPES = {"bf16": 0.0, "bf16-control": 0.0, "tensorwise": 0.002, "mxfp8": 0.0, "nvfp4": 0.03, "<odd & name>": 0.0}
STEPS = 60
STUDY_POINTS = Path(__file__).resolve().parents[2] / "docs/reports/stdlib_cpu/points.json"


@dataclass(frozen=True)
class Seen:
    """The page as the browser rendered it."""

    page: Any
    requests: list[str]
    complaints: list[str]


def write_run(folder: Path, recipe: str, seed: int) -> Path:
    """The records of a run that learns. Its gap is that of the recipe plus some noise."""
    noise = np.random.default_rng([seed, *map(ord, recipe)]).normal(0, 0.0004, STEPS)
    sink = JsonlSink(folder / recipe / f"seed{seed}" / "records.jsonl")
    text = recipe if recipe.startswith("bf16") else f"fp8 hybrid {recipe}, emulated, on bf16"
    config = {"training": {"seed": seed, "micro_batch_size": 8 if recipe == "bf16-control" else 16}}
    sink.write(RunRecord(config_hash="0", config=config, world_size=1, layout={}, recipe=text, device_name="a CPU"))
    for step in range(1, STEPS + 1):
        loss = (2.0 + 6.0 / (1 + step / 8) + 0.1 * seed) * (1 + RECIPES[recipe] + noise[step - 1])
        common = {"step": step, "loss": loss, "consumed_tokens": step * 2048}
        sink.write(
            StepRecord(
                **common,
                consumed_samples=step * 16,
                learning_rate=1e-3,
                step_ms=100.0,
                tokens_per_second=20480.0,
                grad_norm=1 + 1 / step,
                memory_peak_bytes=600 << 20,
            )  # fmt: skip
        )
        if step % 10 == 0:
            sink.write(EvalRecord(**common, split="valid", perplexity=math.exp(loss), num_tokens=500, eval_ms=1.0))
    sink.close()
    return folder / recipe / f"seed{seed}"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of all recipes, with three seeds each."""
    folder = tmp_path_factory.mktemp("report")
    runs = [write_run(folder, recipe, seed) for seed in (1, 2, 3) for recipe in RECIPES]
    publish_comparison(runs, output_folder=folder / "out", title="Six <recipes> & three seeds")
    return folder / "out" / "report.html"


def open_page(browser: Any, report: Path, scheme: str, width: int = 1100) -> Seen:
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
    seen = Seen(page, [], [])
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("requestfailed", lambda request: seen.complaints.append(f"failed: {request.url}"))
    page.on("console", lambda message: seen.complaints.append(message.text))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.goto(report.as_uri(), wait_until="load")
    return seen


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium. Without one, the tests here are skipped."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as driver:
        sandbox = [] if os.getuid() else ["--no-sandbox"]  # Chromium's sandbox does not run as root
        yield driver.chromium.launch(executable_path=path, args=sandbox)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_complete_and_self_contained(browser: Any, report: Path, scheme: str, tmp_path: Path) -> None:
    seen = open_page(browser, report, scheme)
    assert seen.complaints == []
    assert [url for url in seen.requests if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in seen.requests if url.startswith("file:")]) == 1
    assert seen.page.title() == "Six <recipes> & three seeds"
    rows = seen.page.locator("#verdicts tbody tr")
    assert rows.count() == len(RECIPES)
    assert {row.get_attribute("data-recipe") for row in rows.all()} == set(RECIPES)
    boxes = [picture.bounding_box() for picture in seen.page.locator("figure svg:visible").all()]
    assert len(boxes) == 6 and all(box["width"] > 500 and box["height"] > 90 for box in boxes)
    broken = "[...document.images].filter(image => !image.complete || image.naturalWidth === 0).length"
    assert seen.page.evaluate(broken) == 0
    check_is_not_blank(seen.page.screenshot(path=tmp_path / "page.png", full_page=True), tmp_path, scheme)
    seen.page.close()


def check_is_not_blank(content: bytes, folder: Path, scheme: str) -> None:
    """A page of the scheme's brightness, with text and curves in many colours everywhere."""
    from matplotlib.image import imread

    assert len(content) > 50_000
    pixels = imread(folder / "page.png")[..., :3]
    brightness = pixels.mean(axis=2)
    assert (np.median(brightness) > 0.9) if scheme == "light" else (np.median(brightness) < 0.2)
    bands = np.array_split(brightness, 12)
    assert all(band.std() > 0.02 for band in bands), [float(band.std()) for band in bands]
    saturation = pixels.max(axis=2) - pixels.min(axis=2)
    assert (saturation > 0.4).mean() > 0.001


@pytest.mark.slow
def test_text_is_readable_in_both_schemes(browser: Any, report: Path) -> None:
    """The text colours of the pictures follow the page's: dark on light, light on dark."""
    brightness = {}
    for scheme in ("light", "dark"):
        seen = open_page(browser, report, scheme)
        color = "getComputedStyle(document.querySelector('figure svg text')).fill"
        channels = seen.page.evaluate(color).removeprefix("rgb(").removesuffix(")").split(",")
        brightness[scheme] = sum(map(float, channels)) / 3
        seen.page.close()
    assert brightness["light"] < 60 and brightness["dark"] > 190


@pytest.fixture(scope="module")
def scaling_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the committed study."""
    folder = tmp_path_factory.mktemp("scaling")
    publish_study(STUDY_POINTS, folder)
    return folder / "report.html"


LABEL_PIXELS = """
() => [...document.querySelectorAll('figure svg')].filter(svg => svg.getBoundingClientRect().width > 0).map(svg =>
  Math.min(...[...svg.querySelectorAll('text')].map(text => parseFloat(getComputedStyle(text).fontSize)))
  * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width)
"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 760, 1400])
@pytest.mark.parametrize("name", ["report", "scaling_report"])
def test_frames_scroll_and_not_the_page_and_labels_are_legible(
    browser: Any, request: pytest.FixtureRequest, name: str, width: int
) -> None:
    seen = open_page(browser, request.getfixturevalue(name), "light", width=width)
    seen.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    sizes = seen.page.evaluate(LABEL_PIXELS)
    assert sizes and all(11 <= size <= 17 for size in sizes), sizes
    seen.page.close()


@pytest.mark.slow
def test_print_cuts_nothing_off(browser: Any, report: Path) -> None:
    """In print, on A4 with margins, every table fits. The colours are those for paper, also with a dark screen."""
    seen = open_page(browser, report, "dark", width=680)
    seen.page.emulate_media(media="print")
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 680
    assert "rgb(255, 255, 255)" in seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    seen.page.close()


def test_verdicts_and_notes_are_in_the_text(report: Path) -> None:
    """Without a browser, too: what the page says about six recipes."""
    text = report.read_text(encoding="utf-8")
    assert "No difference found: mxfp8 " in text and "&lt;odd &amp; name&gt; " in text
    assert re.search(r"Worse: [^<]*nvfp4 \+2.99% \u00b10.02% \(3 seeds, against bf16\)\.", text)
    assert re.search(r'<td class="left verdict control">control</td>', text)
    assert "bf16-control is a control: bf16 with its gradients summed in another order" in text
    assert "Recipes were emulated" in text and "<odd" not in text
    assert "http://" not in text.replace("http://www.w3.org", "") and "https://" not in text
    assert "<script" not in text and len(text) < 1_500_000


def test_the_same_runs_give_the_same_page(report: Path) -> None:
    """Bitwise, so that a committed report changes only with its runs."""
    folder = report.parents[1]
    runs = [folder / recipe / f"seed{seed}" for seed in (1, 2, 3) for recipe in RECIPES]
    publish_comparison(runs, output_folder=folder / "again", title="Six <recipes> & three seeds")
    assert (folder / "again" / "report.html").read_bytes() == report.read_bytes()
