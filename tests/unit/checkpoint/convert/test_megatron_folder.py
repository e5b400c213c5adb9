"""Folders of Megatron-LM: which checkpoint is read, and files that are not what they should be."""

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.checkpoint.convert.megatron_folder import open_megatron_checkpoint
from megafp8.checkpoint.megatron_lm import refuse_megatron_folder
from megafp8.errors import CheckpointError

ARGS = argparse.Namespace(tensor_model_parallel_size=2, data_parallel_size=3, context_parallel_size=2)
COMMON = {"args": ARGS, "iteration": 7}


class Harmful:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def make_checkpoint(folder: Path, step: int, common: Any) -> Path:
    path = folder / f"iter_{step:07d}"
    path.mkdir(parents=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (path / ".metadata").write_bytes(b"")
    torch.save(common, path / "common.pt")
    return path


def test_the_newest_checkpoint_is_opened(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 3, COMMON)
    path = make_checkpoint(tmp_path, 7, COMMON)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    for found in (open_megatron_checkpoint(tmp_path), open_megatron_checkpoint(path)):
        assert (found.path, found.step, found.layout) == (path, 7, (1, 2, 6))
    assert open_megatron_checkpoint(tmp_path, 3).path.name == "iter_0000003"


@pytest.mark.parametrize(
    ("pointer", "step", "message"),
    [
        (None, None, "cannot be read .*give --ckpt-step N"),
        ("release", None, "names no iteration but 'release'"),
        ("8", None, "no checkpoint of iteration 8; it has: 7"),
        ("7", 9, "no checkpoint of iteration 9"),
    ],
)
def test_a_checkpoint_that_is_absent(pointer: Any, step: Any, message: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 7, COMMON)
    if pointer is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(pointer)
    with pytest.raises(CheckpointError, match=message):
        open_megatron_checkpoint(tmp_path, step)


@pytest.mark.parametrize(
    ("common", "message"),
    [
        ({"iteration": 7}, "no arguments and iteration"),
        ({"args": {"num_layers": 2}, "iteration": 7}, "no arguments and iteration"),
        ({"args": ARGS, "iteration": "7"}, "no arguments and iteration"),
        ([1, 2], "holds a list instead of named values"),
    ],
)
def test_plain_values_of_another_program(common: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_megatron_checkpoint(make_checkpoint(tmp_path, 7, common))


def test_no_code_of_the_checkpoint_runs(tmp_path: Path) -> None:
    args = argparse.Namespace(num_layers=Harmful(tmp_path / "was_here"))
    path = make_checkpoint(tmp_path, 7, {"args": args, "iteration": 7})
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint"):
        open_megatron_checkpoint(path)
    assert not (tmp_path / "was_here").exists()


def test_a_size_that_is_no_number(tmp_path: Path) -> None:
    args = argparse.Namespace(tensor_model_parallel_size="two")
    found = open_megatron_checkpoint(make_checkpoint(tmp_path, 7, {"args": args, "iteration": 7}))
    with pytest.raises(CheckpointError, match="tensor_model_parallel_size is 'two'"):
        _ = found.layout


@pytest.mark.parametrize(
    ("name", "size"),
    [("context_parallel_size", 2**40), ("data_parallel_size", 10**8), ("tensor_model_parallel_size", 2**20)],
)
def test_sizes_of_no_machine(name: str, size: int, tmp_path: Path) -> None:
    args = argparse.Namespace(**{name: size, "pipeline_model_parallel_size": None})
    found = open_megatron_checkpoint(make_checkpoint(tmp_path, 7, {"args": args, "iteration": 7}))
    with pytest.raises(CheckpointError, match=f"more than 131,072 ranks: .*{name} {size}"):
        _ = found.layout


@pytest.mark.parametrize("value", ["x", -5, 1.5, None, True, 2**63])
def test_samples_that_are_no_number(value: Any, tmp_path: Path) -> None:
    args = argparse.Namespace(consumed_train_samples=value)
    found = open_megatron_checkpoint(make_checkpoint(tmp_path, 7, {"args": args, "iteration": 7}))
    with pytest.raises(CheckpointError, match=f"consumed_train_samples is {value!r}, and has to be"):
        _ = found.consumed_samples


def test_samples_that_a_checkpoint_does_not_name(tmp_path: Path) -> None:
    found = open_megatron_checkpoint(make_checkpoint(tmp_path, 7, {"args": argparse.Namespace(), "iteration": 7}))
    assert found.consumed_samples is None


def test_files_that_are_cut_off_or_missing(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 7, COMMON)
    content = (path / "common.pt").read_bytes()
    (path / "common.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint"):
        open_megatron_checkpoint(path)
    (path / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="it is not a checkpoint of --ckpt-format torch_dist"):
        open_megatron_checkpoint(path)


def test_the_old_format_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="--ckpt-format torch.*--ckpt-convert-format torch_dist"):
        open_megatron_checkpoint(tmp_path, 7)
    with pytest.raises(CheckpointError, match="megafp8 convert from-megatron"):
        refuse_megatron_folder(tmp_path)


def test_only_folders_of_megatron_are_refused_for_a_run(tmp_path: Path) -> None:
    refuse_megatron_folder(tmp_path / "absent")
    make_checkpoint(tmp_path / "other", 7, {"config": "{}"})
    refuse_megatron_folder(tmp_path / "other")
    path = make_checkpoint(tmp_path / "damaged", 7, COMMON)
    (path / "common.pt").write_bytes(b"")
    refuse_megatron_folder(tmp_path / "damaged")
    make_checkpoint(tmp_path / "megatron", 7, COMMON)
    with pytest.raises(CheckpointError, match="megafp8 convert from-megatron"):
        refuse_megatron_folder(tmp_path / "megatron")
