"""`megafp8 precision-table` and the runs that it starts: a tiny model on a CPU."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from forked_python import forked_python

from megafp8.analysis.precision_rows import PrecisionRow, cells_of, table_markdown
from megafp8.cli import precision_table
from megafp8.recipes import registry

TOOL = Path(__file__).resolve().parents[2] / "tools/precision_table.py"
FLAGS = shlex.split(
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 64 "
    "--max-position-embeddings 64 --tokenizer-type NullTokenizer --vocab-size 127 --mock-data --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 5 --lr 1e-3 --eval-iters 0 --log-interval 1 --num-threads 1 "
    "--no-save-optim --no-save-rng"
)
OPTIONS = ("--precisions", "fp32,nvfp4", "--search-batch", "2", "--memory-limit", "4")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess]:
    folder = tmp_path_factory.mktemp("table") / "out"
    with tempfile.TemporaryDirectory(prefix="python_") as name, forked_python(Path(name)) as environment:
        command = [environment["PYTHON"], str(TOOL), "--output-dir", str(folder), *OPTIONS]
        return folder, subprocess.run(
            [*command, "--", *FLAGS], capture_output=True, text=True, timeout=600, env=environment
        )


@pytest.mark.slow
def test_the_table_has_speed_memory_loss_and_sizes(finished) -> None:
    folder, done = finished
    assert done.returncode == 0, done.stderr
    text, data = (folder / "precision_table.md").read_text(), json.loads((folder / "precision_table.json").read_text())
    assert text in done.stdout and "5 steps of 4 sequences" in text and "NOT DONE" not in text
    assert [row["name"] for row in data["rows"]] == ["fp32", "nvfp4"]
    for row in data["rows"]:
        assert row["tokens_per_second"] > 0 and row["fastest_tokens_per_second"] > 0 and 4 < row["loss"] < 6
        assert row["steps"] == 5 and row["peak_bytes"] > 2**20 and row["largest_size"] == 2 and row["is_capped"]
    losses = [row["loss"] for row in data["rows"]]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.02)
    assert "emulated" in data["rows"][1]["recipe"] and "at least 2" in text


@pytest.mark.slow
def test_repeating_the_command_runs_nothing_and_other_settings_are_refused(finished, capsys) -> None:
    folder, _ = finished
    before = (folder / "precision_table.json").read_text()
    (folder / "precision_table.json").unlink()
    assert precision_table.main(["--output-dir", str(folder), *OPTIONS, "--", *FLAGS]) == 0
    assert "4 of 4 runs are done already" in capsys.readouterr().err
    assert (folder / "precision_table.json").read_text() == before
    assert precision_table.main(["--output-dir", str(folder), *OPTIONS, "--", *FLAGS, "--lr", "5e-4"]) == 64
    assert "holds a run with other settings (optimizer.lr: 0.001 -> 0.0005)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_fails_is_reported_and_resumed(finished, capsys, monkeypatch) -> None:
    """Its state is removed, and its next start fails: the table keeps the other precision."""
    folder, _ = finished
    for path in (folder / "nvfp4/training").glob("*state*"):
        path.unlink()
    monkeypatch.setattr(precision_table, "TRAINING_SCRIPT", Path("no such script"))
    assert precision_table.main(["--output-dir", str(folder), *OPTIONS, "--", *FLAGS]) == 70
    output = capsys.readouterr()
    assert "3 of 4 runs are done already" in output.err
    assert "NOT DONE: nvfp4: training: its command ended with status 2" in output.out
    rows = json.loads((folder / "precision_table.json").read_text())["rows"]
    assert rows[0]["loss"] is not None and rows[1]["loss"] is None and rows[1]["largest_size"] == 2


@pytest.mark.parametrize(
    ("words", "flags", "reason"),
    [
        (("--precisions", "fp32,fp32"), FLAGS, "each once"),
        (("--precisions", ""), FLAGS, "at least one name"),
        (("--precisions", "fp6"), FLAGS, "--precisions fp6: unknown; did you mean fp16?"),
        (("--search-batch", "-1"), FLAGS, "--search-batch -1: must be at least 1"),
        ((), [*FLAGS, "--bf16"], "set by --precisions"),
        ((), [*FLAGS, "--fp8-recipe", "mxfp8", "--fp8-format", "e4m3"], "--fp8-recipe in the flags of all runs"),
        ((), [*FLAGS, "--hidden-size", "48"], "mxfp8, training: "),
    ],
)
def test_wrong_flags_are_refused_before_any_start(words, flags, reason, tmp_path: Path, capsys) -> None:
    assert precision_table.main(["--output-dir", str(tmp_path / "out"), *words, "--", *flags]) == 64
    assert reason in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_default_precisions_are_those_of_the_device() -> None:
    fp4 = [recipe.name for recipe in registry.recipes() if recipe.family == "fp4" and recipe.te_recipe_class]
    found = precision_table.default_precisions(["delayed", "tensorwise"])
    assert found == ["fp32", "bf16", "tensorwise", "delayed", *fp4]
    emulated = precision_table.default_precisions([])
    assert {"delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"} < set(emulated) and "rowwise" not in emulated


def test_a_dry_run_prints_both_runs_of_each_precision(tmp_path: Path) -> None:
    """In a new interpreter, as a user starts it."""
    words = ["--output-dir", str(tmp_path), "--precisions", "fp32,bf16", "--dry-run", "--", *FLAGS]
    done = subprocess.run([sys.executable, str(TOOL), *words], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = ["fp32/training", "fp32/largest", "bf16/training", "bf16/largest"]
    assert [line.split(":")[0] for line in lines] == names
    assert "--bf16" not in lines[0] and "--bf16" in lines[2] and "--micro-batch-size auto" in lines[1]


def test_cells_of_what_was_not_measured_are_empty() -> None:
    whole = PrecisionRow(
        name="bf16", recipe="bf16", steps=9, tokens_per_second=3000.0, peak_bytes=2**31, loss=3.25, largest_size=1024,
        fastest_size=512, fastest_tokens_per_second=4000.0,
    )  # fmt: skip
    assert cells_of(whole, 2000.0) == ["bf16", "bf16", "3,000", "1.50", "2.00", "3.2500", "1,024", "512", "4,000"]
    failed = PrecisionRow(name="fp32", problems=("training: out of memory | here",))
    assert cells_of(failed, None) == ["fp32", *[""] * 8]
    assert "- NOT DONE: fp32: training: out of memory \\| here" in table_markdown([failed], "t", [])


def test_the_file_of_a_search_is_checked() -> None:
    from types import SimpleNamespace

    from megafp8.analysis.precision_rows import with_sizes
    from megafp8.errors import DataError

    info = SimpleNamespace(
        config={"data": {"seq_length": 8}, "training": {"global_batch_size": 64}}, layout={"data": 1}, recipe="bf16"
    )
    run = SimpleNamespace(info=info, folder=Path("x"))
    trials = [{"size": size, "ms_per_sample": ms} for size, ms in ((4, 2.0), (8, 1.0), (16, 1.6), (32, None))]
    row = with_sizes(PrecisionRow(name="a"), run, {"trials": trials})
    assert (row.largest_size, row.is_capped, row.fastest_size, row.fastest_tokens_per_second) == (16, False, 8, 8000)
    for wrong in ({}, {"trials": [{}]}, {"trials": []}, None):
        with pytest.raises(DataError, match="not the result of a search"):
            with_sizes(PrecisionRow(name="a"), run, wrong)


def test_ranks_and_half_precision_reach_the_commands(capsys, tmp_path) -> None:
    options = ["--output-dir", str(tmp_path / "out"), "--precisions", "fp16,tensorwise", "--search-batch", "0"]
    assert precision_table.main([*options, "--nproc-per-node", "2", "--dry-run", "--", *FLAGS]) == 0
    half, fp8 = capsys.readouterr().out.splitlines()
    assert "torch.distributed.run --standalone --nproc-per-node 2" in half and "--fp16" in half and "--bf16" not in half
    assert "--bf16" in fp8 and "--nproc-per-node 2" in fp8
