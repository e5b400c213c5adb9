"""Names of runs and folders are plain text in every output: neither HTML nor Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Optional

import pytest
from matplotlib.figure import Figure

from megafp8.analysis import comparison_page
from megafp8.analysis.compare import Comparison
from megafp8.analysis.comparison_page import publish_comparison
from megafp8.analysis.html import PageFigure, PageSection, to_svg
from megafp8.analysis.runs import LoadedRun, load_runs
from megafp8.analysis.scaling_report import ScalingReport
from megafp8.analysis.scaling_report import to_markdown as scaling_markdown
from megafp8.analysis.tables import to_markdown

HARMLESS = "name"
HOSTILE = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", '"><b id=x onload=y>', "--><b>", "</text></svg><b>",
    "&lt;b>", "a|b", "a\\|b", "[x](javascript:alert(1))", "![x](http://beacon)", "`code", "back\\", "*x*",
    "two\nlines\r\u2028four", "\n\n# heading", "# heading", "- item", "1. item", "> quote", "\x1b[31mred",
)  # fmt: skip


def compared(name: str, write_run: Callable[..., Path]) -> tuple[Comparison, list[LoadedRun]]:
    """Runs of which two have a hostile name in folder and record, one has another seed, and one has no validation."""
    folders = [
        write_run("base", [4.0, 3.0], validations={2: 3.0}, device_name=name),
        *(
            write_run(f"{HARMLESS}{seed}/{name.replace('/', '_')}", [4.0, 3.0], validations={2: 3.1}, recipe=name,
                      device_name=name, config={"training": {"seed": seed}, "data": {"data_path": [name]}})
            for seed in (1, 2)
        ),
    ]  # fmt: skip
    comparison, _ = publish_comparison(folders)
    return comparison, load_runs(folders)


def markup(line: str) -> list[str]:
    """Unescaped characters that start Markdown or HTML markup."""
    plain = re.sub(r"\\[\\`*\[\]|#+.)-]", "", line)
    return re.findall(r"[<`*\[\]|]|&(?!lt;|amp;)|^(?:#+|>|\d+[.)])(?= )", plain)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_text_in_the_markdown_of_a_comparison(name: str, write_run: Callable[..., Path]) -> None:
    found, expected = (to_markdown(compared(each, write_run)[0]).splitlines() for each in (name, HARMLESS))
    assert list(map(markup, found)) == list(map(markup, expected))
    assert all(map(str.isprintable, found))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_text_in_the_markdown_of_a_study(name: str) -> None:
    found, expected = (
        scaling_markdown(
            ScalingReport(
                name=each, baseline=each, recipes=(each,), arithmetic=(each,), num_runs=1, missing=(each,), axes=(),
                gaps=(), agreements=(), speeds=(), cells=(), notes=(each,), replicates=0,
            ), "laws.svg",
        ).splitlines()
        for each in (name, HARMLESS)
    )  # fmt: skip
    assert list(map(markup, found)) == list(map(markup, expected))


class Tags(HTMLParser):
    """Names of the elements and attributes of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.found: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Optional[str]]]) -> None:
        self.found |= {tag, *(name for name, _ in attrs)}


def test_a_name_is_text_in_a_page(write_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def picture(name: str) -> str:
        figure = Figure()
        figure.suptitle(name)
        return to_svg(figure, name)

    def tags(name: str) -> set[str]:
        views = {"wide": picture(name), "narrow": picture(name)}
        figures = [PageSection(title=name, figures=[PageFigure(pictures={name: views}, caption=name)])]
        monkeypatch.setattr(comparison_page, "figures", lambda *_: figures)
        return Tags(comparison_page.render_page(*compared(name, write_run), title=name)).found

    assert tags(" ".join(HOSTILE[:6])) == tags(HARMLESS)
