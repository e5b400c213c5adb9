import json

import pytest

from megafp8.errors import DataError
from megafp8.reports.publish import publish_comparison


@pytest.fixture
def folders(write_run):
    return [write_run("bf16", [4.0, 3.0], validations={2: 3.0}), write_run("fp8", [4.0, 3.1], validations={2: 3.3})]


def test_all_files_are_written(folders, tmp_path) -> None:
    comparison, written = publish_comparison(folders, output_folder=tmp_path / "deep" / "out")
    names = ["comparison.json", "comparison.md", "gaps.svg", "loss_curves.png", "report.html"]
    assert sorted(path.name for path in written) == names
    assert all(path.stat().st_size > 100 for path in written)
    assert json.loads((tmp_path / "deep" / "out" / "comparison.json").read_text())["baseline"] == "bf16"
    assert "+10.00%" in (tmp_path / "deep" / "out" / "comparison.md").read_text()
    assert comparison.baseline == "bf16"


def test_the_baseline_is_a_name_or_a_folder(folders) -> None:
    for baseline in ("fp8", str(folders[1]), str(folders[1]) + "/"):
        comparison, written = publish_comparison(folders, baseline=baseline)
        assert comparison.baseline == "fp8"
        assert written == []
    with pytest.raises(DataError, match="none of the runs"):
        publish_comparison(folders, baseline="mxfp8")


def test_one_run_alone_has_a_page_without_gaps(folders, tmp_path) -> None:
    publish_comparison(folders[:1], output_folder=tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    assert "there is nothing to compare it with" in text and text.count("<svg ") == 4
    assert not (tmp_path / "out" / "gaps.svg").exists()


def test_the_picture_of_gaps_needs_no_page(folders, tmp_path) -> None:
    publish_comparison(folders, output_folder=tmp_path / "out")
    picture = (tmp_path / "out" / "gaps.svg").read_text()
    assert picture.startswith("<svg ") and "var(--" not in picture and "fp8" in picture
