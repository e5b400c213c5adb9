import dataclasses
import json

import pytest

from megafp8.analysis import tables
from megafp8.analysis.comparison_page import publish_comparison
from megafp8.errors import DataError
from megafp8.resilience.run_state import RUN_STATE_FILE, RunState
from megafp8.utils.process import Process


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


def set_state(folder, **fields) -> None:
    process = Process(host="elsewhere", place="elsewhere", pid=1, started=0)
    state = RunState(state="failed", world_size=1, process=process, started_at=0.0, updated_at=0.0)
    (folder / RUN_STATE_FILE).write_text(json.dumps(dataclasses.replace(state, **fields).to_plain()))


def test_unfinished_runs_are_reported_in_every_output(folders, tmp_path, write_run) -> None:
    broken = write_run("mxfp8", [4.0])  # it was never validated
    set_state(folders[0], state="done")
    set_state(broken, step=1, reason="out of memory:\n  2 GiB")
    comparison, _ = publish_comparison([*folders, broken], output_folder=tmp_path / "out")
    said = "mxfp8 is not done and not in the figures: out of memory: 2 GiB"
    assert comparison.warnings == (said,)
    for name in ("report.html", "comparison.md", "comparison.json"):
        text = (tmp_path / "out" / name).read_text()
        assert said in text and "not decided" in text
    assert 'data-recipe="mxfp8"' in (tmp_path / "out" / "report.html").read_text()


def test_a_recipe_without_a_seed_of_the_baseline_has_a_row(write_run, tmp_path) -> None:
    folders = [
        write_run(f"{name}/seed{seed}", [4.0, 3.0], validations={2: 3.0}, recipe=name,
                  config={"training": {"seed": seed}})
        for name, seeds in (("fp8", [3]), ("bf16", [1, 2])) for seed in seeds
    ]  # fmt: skip
    comparison, _ = publish_comparison(folders, baseline="bf16", output_folder=tmp_path / "out")
    row = comparison.recipes[0]
    assert (row.name, row.seeds, row.num_missing, row.verdict) == ("fp8", (), 1, "not decided")
    assert 'data-recipe="fp8"' in (tmp_path / "out" / "report.html").read_text()


def test_a_missing_seed_belongs_to_its_own_folder(write_run) -> None:
    folders = {
        f"{name}/seed{seed}": write_run(
            f"{name}/seed{seed}", [4.0, 3.0], validations={2: 3.0}, config={"training": {"seed": seed}}
        )
        for name in ("bf16", "exp1/fp8", "exp2/fp8") for seed in (1, 2, 3)
    }  # fmt: skip
    set_state(folders["exp2/fp8/seed2"], step=1, state="stopped")
    comparison, _ = publish_comparison(list(folders.values()), baseline=str(folders["bf16/seed1"]))
    rows = {row.name: (row.seeds, row.num_missing, row.verdict) for row in comparison.recipes[1:]}
    assert rows == {"exp1/fp8": ((1, 2, 3), 0, "within"), "exp2/fp8": ((1, 3), 1, "not decided")}


def test_an_unfinished_baseline_is_not_used(folders) -> None:
    set_state(folders[0], step=5, state="stopped")
    for baseline in (None, "bf16", str(folders[0])):
        with pytest.raises(DataError, match="no run of bf16, .* is done: stopped at step 5"):
            publish_comparison(folders, baseline=baseline)
    comparison, _ = publish_comparison(folders, include_unfinished=True)
    assert comparison.baseline == "bf16" and comparison.recipes[1].verdict == "not decided"
    assert comparison.warnings[0] == "bf16 is not done and in the figures with what it has so far: stopped at step 5"
    set_state(folders[1], step=5, state="stopped")
    with pytest.raises(DataError, match="nothing to compare: bf16 is not done .*; fp8 is not done"):
        publish_comparison(folders)


def test_comparison_with_an_unvalidated_control(tmp_path, write_run) -> None:
    runs = [write_run(f"{name}/seed1", [4.0, 3.2]) for name in ("bf16", "bf16-control")]
    for folder in runs:
        set_state(folder, state="running", step=2)
    comparison, _ = publish_comparison(runs, include_unfinished=True, output_folder=tmp_path / "out")
    assert [row.gaps_fraction for row in comparison.recipes] == [(), ()]


def test_comparison_of_unvalidated_runs(folders, tmp_path, write_run) -> None:
    training = write_run("fp4", [4.0, 3.2], step_fields={"memory_peak_bytes": 2**20})
    beginning, unwritten = write_run("mxfp8"), tmp_path / "nvfp4"
    unwritten.mkdir()
    for folder in (training, beginning, unwritten):
        set_state(folder, state="running", step=2)
    every = [*folders, training, beginning, unwritten]
    comparison, _ = publish_comparison(every, include_unfinished=True, output_folder=tmp_path / "out")
    rows = {row.name: row for row in comparison.recipes}
    row = rows["fp4"]
    assert (row.validation_loss, row.perplexity, row.gap, row.gaps_fraction) == (None, None, None, ())
    assert (row.training_loss, row.tokens_per_second, row.memory_peak_bytes, row.steps) == (3.2, 100.0, 2**20, 2)
    assert row.training_gap.mean == pytest.approx(0.2 / 3.0) and row.verdict == "not decided"
    assert rows["fp8"].gap.mean == pytest.approx(0.1)
    assert rows["mxfp8"].seeds == rows["nvfp4"].seeds == ()
    text = tables.to_text(comparison)
    assert "training loss" in text and "3.2000" in text and "mxfp8 is not done and not in the figures" in text
    assert 'data-recipe="fp4"' in (tmp_path / "out" / "report.html").read_text()
    set_state(training, state="done")
    with pytest.raises(DataError, match="run fp4 .* no validation; its settings ask for validations"):
        publish_comparison(every, include_unfinished=True)


def test_comparison_before_any_validation(write_run, tmp_path) -> None:
    folders = [
        write_run(f"{name}/seed{seed}", [4.0, loss], recipe=name, config={"training": {"seed": seed}})
        for name, loss in (("bf16", 3.0), ("fp8", 3.3)) for seed in (1, 2)
    ]  # fmt: skip
    for folder in folders:
        set_state(folder, state="running", step=2)
    comparison, written = publish_comparison(folders, include_unfinished=True, output_folder=tmp_path / "out")
    assert not comparison.has_gaps and "gaps.svg" not in [path.name for path in written]
    assert comparison.recipes[1].training_gap.mean == pytest.approx(0.1)
    assert "3.3000" in (tmp_path / "out" / "comparison.md").read_text()


def test_runs_of_the_same_folder_name_are_distinguished(write_run) -> None:
    folders = [write_run(f"{name}/run", [4.0, 3.0], validations={2: 3.0}, recipe=name) for name in ("bf16", "fp8")]
    set_state(folders[1], state="running", step=2)
    for include_unfinished in (False, True):
        comparison, _ = publish_comparison(folders, include_unfinished=include_unfinished)
        assert [row.name for row in comparison.recipes] == ["bf16/run", "fp8/run"]
        assert [row.verdict for row in comparison.recipes] == ["", "not decided"]
        assert [row.num_missing for row in comparison.recipes] == [0, 0 if include_unfinished else 1]
        assert comparison.warnings[0].startswith("fp8/run is not done")


def test_a_single_run_has_a_page_without_gaps(folders, tmp_path) -> None:
    publish_comparison(folders[:1], output_folder=tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    assert "There is no baseline: bf16 is the only recipe." in text and text.count('class="wide"') == 4
    assert not (tmp_path / "out" / "gaps.svg").exists()


def test_the_picture_of_gaps_needs_no_page(folders, tmp_path) -> None:
    publish_comparison(folders, output_folder=tmp_path / "out")
    picture = (tmp_path / "out" / "gaps.svg").read_text()
    assert picture.startswith("<svg ") and "var(--" not in picture and "fp8" in picture
