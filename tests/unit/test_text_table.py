"""Tables as text, letter for letter."""

from __future__ import annotations

from megafp8.text_table import aligned, markdown

HEADER, ROWS = ("run", "steps", "layout"), [("bf16", "7", "one rank"), ("x", "1,000", "")]


def test_words_are_to_the_left_and_numbers_to_the_right() -> None:
    assert aligned(HEADER, ROWS, "lrl").splitlines() == [
        "run   steps  layout", "----  -----  --------", "bf16      7  one rank", "x     1,000",
    ]  # fmt: skip
    assert aligned(HEADER, ROWS).splitlines()[0] == "run   steps    layout"


def test_markdown_says_the_same() -> None:
    assert markdown(HEADER, ROWS, "lrl").splitlines() == [
        "| run  | steps | layout   |",
        "|------|------:|----------|",
        "| bf16 |     7 | one rank |",
        "| x    | 1,000 |          |",
    ]


def test_a_table_without_rows_has_its_header() -> None:
    assert aligned(("run", "steps"), []) == "run  steps\n---  -----"
