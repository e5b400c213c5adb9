import shutil

import numpy as np
import pytest

from megafp8.analysis.runs import load_run, load_runs
from megafp8.errors import DataError


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


def test_a_folder_without_a_run_is_an_error(tmp_path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match=r"there is no records.jsonl; give the folder that the run had as --save"):
            load_run(folder)
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(DataError, match="no run record"):
        load_run(tmp_path)


def test_the_first_invalid_line_is_named(tmp_path) -> None:
    for text, said in (("\nhello\nworld\n", "line 2: not valid JSON"), ('{"kind": "x"', "line 1: not valid")):
        (tmp_path / "records.jsonl").write_text(text)
        with pytest.raises(DataError, match=f"0 records and no run record, .*; {said}"):
            load_run(tmp_path)


@pytest.mark.parametrize(
    ("config", "mend"),
    [
        ({"training": {"eval_iters": 0}}, "--eval-iters 0 is no validation: train with --eval-iters above 0"),
        ({"data": {"split": "100,0,0"}}, "--split 100,0,0 holds nothing out: train with a second part above 0"),
        ({"data": {"train_data_path": ["a"]}}, "--train-data-path alone: train with --valid-data-path"),
        ({"data": {"mock_data": True}, "training": {"eval_iters": 10}}, "its settings ask for validations, .*resume"),
    ],
)
def test_the_fix_for_a_run_without_validation_names_a_setting(write_run, config, mend: str) -> None:
    run = load_run(write_run("a", [1.0, 1.0], config=config))
    assert run.last_validation is None
    with pytest.raises(DataError, match=f"run a .* 2 step records and no validation; .*{mend}"):
        _ = run.final_validation


def test_starts_without_steps_are_no_stage(write_run) -> None:
    write_run("a", [5.0, 4.0], recipe="first")
    write_run("a", [4.0, 3.0], first_step=1, recipe="second")  # restarted: nothing of the first one counts
    folder = write_run("a", recipe="third", resumed_from_step=2)  # ended before its first step
    run = load_run(folder)
    assert [info.recipe for info in run.runs] == ["first", "second", "third"]
    assert [info.recipe for info in run.stages] == ["second"] and run.info.recipe == "second"


def test_run_names_are_distinct(write_run, tmp_path) -> None:
    folder = write_run("one/run", [1.0])
    shutil.copytree(folder, tmp_path / "two" / "run")
    other = write_run("other", [1.0])
    assert [run.name for run in load_runs([folder, other])] == ["run", "other"]
    assert [run.name for run in load_runs([folder, tmp_path / "two" / "run"])] == ["one/run", "two/run"]
    with pytest.raises(DataError, match="given twice"):
        load_runs([folder, other, folder / "records.jsonl"])


@pytest.mark.parametrize(
    ("fresh_tokens", "text"),
    [
        (None, ""),
        (4000, "no text read twice"),
        (1500, "text repeats from step 2 on (read 2.7 times)"),
    ],
)
def test_repeated_text_is_named(write_run, fresh_tokens, text) -> None:
    run = load_run(write_run("bf16", [3.0, 2.0, 2.0, 2.0], fresh_tokens=fresh_tokens))
    assert run.repetition == text
