"""Text in figures: names are taken literally, and powers of ten stay formulas."""

from __future__ import annotations

from pathlib import Path

from megafp8.analysis.plotting import new_figure, save_figure

NAME = "a$\\frac{b}$"


def test_names_are_no_formulas_and_labels_of_powers_are(tmp_path: Path) -> None:
    figure = new_figure(3, 2)
    axes = figure.subplots()
    axes.plot([1, 1e6], [0, 1], label=NAME)
    axes.set_yticks([0, 1], [NAME, "$$"])
    axes.set_xscale("log")
    axes.set_title(NAME)
    legend = axes.legend()
    for name in ("a.png", "b.svg"):
        save_figure(figure, tmp_path / name)
        literal = [axes.title, axes._left_title, *legend.get_texts(), *axes.get_yticklabels()]
        assert not any(text.get_parse_math() for text in literal)
        assert all(text.get_parse_math() for text in axes.get_xticklabels())
    assert NAME in (tmp_path / "b.svg").read_text()  # as a comment, beside its outlines
