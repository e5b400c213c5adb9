"""Tables as text, compared character by character."""

from __future__ import annotations

import pytest

from megafp8.utils.formatting import duration_text, escape_markdown, escaped_markdown_table, markdown_table, text_table

HEADER, ROWS = ("run", "steps", "layout"), [("bf16", "7", "one rank"), ("x", "1,000", "")]


def test_text_is_left_aligned_and_numbers_right_aligned() -> None:
    assert text_table(HEADER, ROWS, "lrl").splitlines() == [
        "run   steps  layout", "----  -----  --------", "bf16      7  one rank", "x     1,000",
    ]  # fmt: skip
    assert text_table(HEADER, ROWS).splitlines()[0] == "run   steps    layout"


def test_markdown_has_the_same_cells() -> None:
    assert markdown_table(HEADER, ROWS, "lrl").splitlines() == [
        "| run  | steps | layout   |",
        "|------|------:|----------|",
        "| bf16 |     7 | one rank |",
        "| x    | 1,000 |          |",
    ]


def test_a_table_without_rows_has_its_header() -> None:
    assert text_table(("run", "steps"), []) == "run  steps\n---  -----"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("bf16_run-2 (+0.50%)", "bf16_run-2 (+0.50%)"),
        ("-", "-"),
        ("+0.50%", "+0.50%"),
        ("a -> b", "a -> b"),
        ("a|b\\|c", r"a\|b\\\|c"),
        ("<b>&lt;", "&lt;b>&amp;lt;"),
        ("![x](y)`*", r"!\[x\](y)\`\*"),
        ("two\r\n\tlines\u2028\x1b[0m", r"two   lines  \[0m"),
        ("# x", r"\# x"),
        ("- x", r"\- x"),
        ("12. x", r"12\. x"),
        ("> x", r"\> x"),
        ("12.5 x", "12.5 x"),
    ],
)
def test_markdown_shows_a_text_as_it_is(text: str, expected: str) -> None:
    assert escape_markdown(text) == expected


def test_cells_may_be_strings() -> None:
    assert escaped_markdown_table(("a|b",), [("<i>\n",)]).splitlines() == [r"| a\|b   |", "|--------|", "| &lt;i> |"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0.4 seconds"), (83, "1.4 minutes"), (45_000, "12.5 hours"), (172_800, "2.0 days"),
        (36_514.5 * 3600, "4.2 years"),
    ],
)  # fmt: skip
def test_a_duration_has_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
