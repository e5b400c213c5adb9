"""Problems of the runs of a comparison, and of what their folders hold."""

from __future__ import annotations

from pathlib import Path

from megafp8.launch.compared_runs import run_problems

FLAGS = (
    "--model-preset tiny --seq-length 64 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type "
    "NullTokenizer --vocab-size 100"
)


def test_a_folder_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    words = FLAGS.split()
    assert run_problems(words, 1, tmp_path) == []
    (tmp_path / "config.json").write_text("{")
    (problem,) = run_problems(words, 1, tmp_path)
    assert f"{tmp_path / 'config.json'} cannot be read" in problem and "take another --output-dir" in problem
    assert run_problems(words, 1, None) == []
