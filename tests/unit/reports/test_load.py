import shutil

import numpy as np
import pytest

from megafp8.errors import DataError
from megafp8.reports.load import load_run, load_runs


def test_a_run_with_its_series(write_run) -> None:
    folder = write_run("bf16", [4.0, float("nan"), 2.0], validations={2: 3.5, 3: 3.0})
    for given in (folder, str(folder), folder / "records.jsonl"):
        run = load_run(given)
        assert (run.name, run.folder) == ("bf16", folder)
        np.testing.assert_array_equal(run.series("loss"), [4.0, np.nan, 2.0])
        np.testing.assert_array_equal(run.series("grad_norm"), [np.nan] * 3)
        assert run.series("consumed_tokens").dtype == np.float64
        assert run.final_validation.loss == 3.0
        assert run.evals_of("test") == ()


def test_a_resumed_run_reads_as_one(write_run) -> None:
    write_run("a", [5.0, 4.0, 3.0, 2.0], validations={4: 9.0})
    folder = write_run("a", [3.5, 2.5], first_step=3, validations={4: 2.6}, resumed_from_step=2, recipe="fp8")
    run = load_run(folder)
    assert run.series("step").tolist() == [1, 2, 3, 4]
    assert run.series("loss").tolist() == [5.0, 4.0, 3.5, 2.5]
    assert [record.loss for record in run.evals] == [2.6]
    assert len(run.runs) == 2
    assert run.info.recipe == "fp8"


def test_no_run_there(tmp_path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match=r"there is no records.jsonl; give the folder that the run had as --save"):
            load_run(folder)
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(DataError, match="no run record"):
        load_run(tmp_path)


def test_no_validation(write_run) -> None:
    run = load_run(write_run("a", [1.0, 1.0]))
    with pytest.raises(DataError, match=r"run a .* 2 step records and no validation; .*--eval-iters"):
        _ = run.final_validation


def test_names_tell_runs_apart(write_run, tmp_path) -> None:
    folder = write_run("one/run", [1.0])
    shutil.copytree(folder, tmp_path / "two" / "run")
    other = write_run("other", [1.0])
    assert [run.name for run in load_runs([folder, other])] == ["run", "other"]
    assert [run.name for run in load_runs([folder, tmp_path / "two" / "run"])] == ["one/run", "two/run"]
    with pytest.raises(DataError, match="given twice"):
        load_runs([folder, other, folder / "records.jsonl"])
