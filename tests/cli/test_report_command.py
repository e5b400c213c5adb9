"""`megafp8 report`: the comparison of runs or the report of a study, by what the folders are."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.cli import compare, report, scaling_report

POINTS = Path(__file__).resolve().parents[2] / "docs/reports/stdlib_cpu/points.json"


def test_the_points_of_a_study_are_reported_as_by_scaling_report(tmp_path: Path, capsys) -> None:
    words = [str(POINTS), "--json"]
    assert report.main([*words, "--output-dir", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert scaling_report.main(words) == 0 and capsys.readouterr().out == output
    assert (tmp_path / "report.html").is_file()


def test_a_folder_of_a_study_is_one(tmp_path: Path, capsys) -> None:
    (tmp_path / "study.json").write_text("{")
    assert report.main([str(tmp_path)]) == scaling_report.main([str(tmp_path)]) == 66
    first, second = capsys.readouterr().err.splitlines()
    assert first == second and first.startswith("scaling-report: ")


def test_other_folders_are_runs(tmp_path: Path, capsys) -> None:
    words = [str(tmp_path), "--bound", "1", "--baseline", "bf16"]
    assert report.main(words) == compare.main(words) == 66
    first, second = capsys.readouterr().err.splitlines()
    assert first == second and "there is no records.jsonl" in first


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([str(POINTS), "--bound", "1"], "unrecognized arguments: --bound 1"),
        (["runs/a", str(POINTS)], "report on a study alone"),
    ],
)
def test_what_does_not_fit_the_folders_is_refused(words: list[str], text: str, capsys) -> None:
    try:
        status: object = report.main(words)
    except SystemExit as error:
        status = error.code
    assert status == 64 and text in capsys.readouterr().err
