"""A dry run looks at the checkpoint that the run would load: a start's refusals, and the step it resumes from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from saved_run import RUN, STEP, configure, copy_as_step, save_initial

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.serialization import FORMAT_FILE
from megafp8.cli import pretrain

MODEL = "--model-preset tiny --bf16 --vocab-size 255 --global-batch-size 1 --mock-data"
FP8 = "--fp8-format e4m3 --fp8-recipe tensorwise"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of step 7. Tests must not write to it."""
    return save_initial(tmp_path_factory.mktemp("saved") / "run", configure(MODEL))


def dry_run(flags: str) -> int:
    """The exit status."""
    return pretrain.main(f"--dry-run {RUN} {MODEL} --tokenizer-type NullTokenizer {flags}".split())


def test_the_step_is_named(saved: Path, tmp_path: Path, capsys) -> None:
    before = sorted(saved.rglob("*"))
    assert dry_run(f"--load {saved} --save {saved}") == 0
    assert f"resumes from step {STEP} ({checkpoint_path(saved, STEP)})" in capsys.readouterr().out
    assert dry_run(f"--load {saved} --save {tmp_path / 'new'} --finetune") == 0
    assert f"starts from step 0 with the weights of {checkpoint_path(saved, STEP)}" in capsys.readouterr().out
    empty = tmp_path / "empty"
    empty.mkdir()
    assert dry_run(f"--load {empty}") == 0
    assert f"no checkpoint in {empty}: starts from step 0" in capsys.readouterr().out
    assert sorted(saved.rglob("*")) == before and list(empty.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--hidden-size 256", "model.hidden_size: "),
        ("--vocab-size 1023", "has an embedding of 256 rows"),
        (FP8, "was trained with a different precision"),
        ("--optimizer sgd", "has the state of --optimizer adam"),
        ("--ckpt-step 8", "--ckpt-step 8: no such checkpoint"),
    ],
)
@pytest.mark.parametrize("target", ["", "--world-size 1 --target h100"])
def test_what_a_start_refuses(saved: Path, flags: str, text: str, target: str, capsys) -> None:
    assert dry_run(f"--load {saved} {flags} {target}") == 74
    output = capsys.readouterr()
    assert text in output.err and output.out == ""


def test_a_folder_to_save_to_with_newer_checkpoints(saved: Path, capsys) -> None:
    assert dry_run(f"--save {saved}") == 74
    assert f"--save {saved} has a checkpoint of step {STEP}, but this run starts at step 0" in capsys.readouterr().err
    assert dry_run(f"--save {saved} --load {saved} --ckpt-step {STEP}") == 0


def test_a_folder_of_megatron(tmp_path: Path, capsys) -> None:
    path = checkpoint_path(tmp_path, 3)
    path.mkdir()
    (path / FORMAT_FILE).write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"args": 0, "iteration": 3}, path / "common.pt")
    for flag in ("--load", "--pretrained-checkpoint"):
        assert dry_run(f"{flag} {tmp_path}") == 74
        assert "is a checkpoint of Megatron-LM. Convert it first" in capsys.readouterr().err


def test_damage_is_reported_and_nothing_renamed(saved: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    copy_as_step(checkpoint_path(saved, STEP), folder, STEP + 1)
    newer = checkpoint_path(folder, STEP + 1)
    (newer / "common.pt").unlink()
    assert dry_run(f"--load {folder} --save {folder}") == 0
    output = capsys.readouterr().out
    assert f"resumes from step {STEP} " in output and f"{newer} is damaged (common.pt is missing)" in output
    assert newer.is_dir()


def test_a_folder_of_another_machine_is_not_checked(tmp_path: Path, capsys) -> None:
    absent, elsewhere = tmp_path / "absent", "--world-size 1 --target h100"
    assert dry_run(f"--load {absent} --save {absent} {elsewhere}") == 0
    assert f"not checked: {absent}, absent on this machine" in capsys.readouterr().out


@pytest.mark.parametrize("flags", ["--exit-on-missing-checkpoint", "--save {}/save"])
def test_an_absent_folder_to_load_has_one_message(tmp_path: Path, flags: str, capsys) -> None:
    absent, flags = tmp_path / "absent", flags.format(tmp_path)
    assert dry_run(f"--load {absent} {flags} --world-size 1 --target h100") == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if str(absent) in line)
    assert line.startswith(f"notice: on this machine: --load {absent}: no such folder") and "never" not in line
    assert dry_run(f"--load {absent} {flags}") == 64
    (line,) = (line for line in capsys.readouterr().err.splitlines() if str(absent) in line)
    assert f"--load {absent}: no such folder" in line
