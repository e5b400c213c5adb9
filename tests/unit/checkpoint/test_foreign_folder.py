"""Folders that are no checkpoints: which ones a run starts from, and which ones are refused with the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafp8.checkpoint.foreign_folder import foreign_content, refuse_foreign_folders
from megafp8.config.schema import CheckpointConfig
from megafp8.errors import CheckpointError

HF = {"config.json": '{"model_type": "llama"}', "model.safetensors": ""}


def make_folder(path: Path, files: dict[str, str]) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


@pytest.mark.parametrize(
    ("files", "told", "told_if_own"),
    [
        ({}, "", ""),
        (HF, "megafp8 convert from-hf", "megafp8 convert from-hf"),
        ({"pytorch_model.bin": ""}, "is a Hugging Face model", "is a Hugging Face model"),
        ({"config.json": '{"architectures": ["A"]}'}, "is a Hugging Face model", "is a Hugging Face model"),
        ({"model.ckpt": ""}, "no checkpoint of megafp8, but model.ckpt", "no checkpoint of megafp8, but model.ckpt"),
        ({"release/x": "", "latest_checkpointed_iteration.txt": "release"}, "no checkpoint", "no checkpoint"),
        ({"slurm-1.out": ""}, "no checkpoint of megafp8, but slurm-1.out", ""),
        # What a run leaves that ended before its first checkpoint, and one that has one.
        ({"config.json": '{"model": {}}', "records.jsonl": "", "run_state.json": "{}", "tensorboard/a": ""}, "", ""),
        ({"iter_0000002.unfinished/a": ""}, "", ""),
        ({"iter_0000002/manifest.json": "{}"} | HF, "", ""),
    ],
)
def test_what_a_folder_holds(tmp_path: Path, files: dict[str, str], told: str, told_if_own: str) -> None:
    folder = make_folder(tmp_path / "folder", files)
    assert told in foreign_content(folder) and bool(told) == bool(foreign_content(folder))
    own = foreign_content(folder, is_own=True)
    assert told_if_own in own and bool(told_if_own) == bool(own)


def test_the_folder_of_one_checkpoint_leads_to_its_run(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "iter_0000020", {"manifest.json": "{}"})
    assert f"give {tmp_path} and --ckpt-step 20" in foreign_content(folder)


@pytest.mark.parametrize("flag", ["load", "pretrained_checkpoint"])
def test_a_run_is_refused(tmp_path: Path, flag: str) -> None:
    folder = make_folder(tmp_path / "qwen", HF)
    command = f"is a Hugging Face model. Convert it: megafp8 convert from-hf {folder} models/qwen"
    with pytest.raises(CheckpointError, match=f"--{flag.replace('_', '-')} {folder} {command}") as refused:
        refuse_foreign_folders(CheckpointConfig(**{flag: str(folder)}))
    assert refused.value.exit_status == 74
    refuse_foreign_folders(CheckpointConfig(load=str(tmp_path / "absent")))
