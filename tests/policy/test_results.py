"""The evidence in benchmarks/results: an index of topics, links that exist, and well-formed rows."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
INDEX = BENCHMARKS / "RESULTS.md"
TOPICS = sorted((BENCHMARKS / "results").glob("*.md"))
LINK = re.compile(r"\]\(([^)#]+)")


def links_of(page: Path) -> list[str]:
    """Targets of the relative links of a page, without their anchors."""
    return [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]


def test_the_index_has_every_topic_and_is_one_screen() -> None:
    assert sorted(set(links_of(INDEX))) == [f"results/{topic.name}" for topic in TOPICS]
    assert len(INDEX.read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("topic", TOPICS, ids=lambda path: path.stem)
def test_links_of_a_topic_exist(topic: Path) -> None:
    assert [link for link in links_of(topic) if not (topic.parent / link).exists()] == []


def test_every_table_of_rows_belongs_to_a_topic_and_has_one_width() -> None:
    files = sorted((BENCHMARKS / "results").rglob("*.csv"))
    assert len(files) > 50
    assert {path.parent.name for path in files if path.parent.name != "results"} <= {topic.stem for topic in TOPICS}
    for path in files:
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
        assert len(rows) > 1 and {len(row) for row in rows} == {len(rows[0])}, path
        assert len(set(rows[0])) == len(rows[0]), f"{path}: two columns of one name"
