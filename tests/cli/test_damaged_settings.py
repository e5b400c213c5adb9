"""Flipped bits in the small files of the newest checkpoint: every reader names it, and reads the one before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from saved_run import RUN, STEP, configure, copy_as_step, save_initial

from megafp8.checkpoint.convert.to_huggingface import ExportOptions, plan_export
from megafp8.checkpoint.convert.to_megatron import plan_megatron_export
from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.manifest import build_manifest, read_manifest, write_manifest
from megafp8.checkpoint.metadata import load_common_state
from megafp8.checkpoint.resume_point import choose_checkpoint, find_source
from megafp8.checkpoint.serialization import COMMON_FILE, METADATA_FILE
from megafp8.cli import checkpoint, pretrain
from megafp8.errors import CheckpointError
from megafp8.training import checkpoint_settings, checks

MODEL = (
    "--model-preset tiny --num-layers 2 --hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 2 --bf16 "
    "--vocab-size 255 --global-batch-size 1 --mock-data"
)
NEWEST = STEP + 1
# Flips of one file, spread over all of it.
NUM_FLIPS = 24


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with equal checkpoints of steps 7 and 8. Tests leave it as it was."""
    folder = save_initial(tmp_path_factory.mktemp("saved") / "run", configure(MODEL))
    copy_as_step(checkpoint_path(folder, STEP), folder, NEWEST)
    return folder


def flip(path: Path, index: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[index] ^= 1 << bit
    path.write_bytes(bytes(content))


def flips(folder: Path, name: str) -> list[tuple[Path, int, int]]:
    """Bits of a file of the newest checkpoint, one of them in the name of a setting."""
    path = checkpoint_path(folder, NEWEST) / name
    content = path.read_bytes()
    positions = [(index * len(content) // NUM_FLIPS, index % 8) for index in range(NUM_FLIPS)]
    if name == COMMON_FILE:
        positions.append((content.index(b"lr_warmup_samples") + 16, 0))
    return [(path, *position) for position in positions]


def dry_run(folder: Path) -> Path:
    assert pretrain.main(f"--dry-run {RUN} {MODEL} --tokenizer-type NullTokenizer --load {folder}".split()) == 0
    return checkpoint_path(folder, STEP)  # the text is compared by the test


def choices_of_a_start(folder: Path) -> Path:
    found = checks.saved_config(configure(f"{MODEL} --load {folder}"))
    assert found == configure(MODEL)
    return checkpoint_path(folder, STEP)


def checkpoint_args(folder: Path) -> Path:
    parsed, problems = checkpoint_settings.parse(["--load", str(folder), "--use-checkpoint-args"])
    assert not problems and parsed.config.model.hidden_size == 32
    return checkpoint_path(folder, STEP)


def size_verification(folder: Path) -> Path:
    found = choose_checkpoint(folder, with_hashes=False)
    assert found is not None and f"{checkpoint_path(folder, NEWEST)} is damaged" in found.notes[0]
    return found.path


READERS: dict[str, Callable[[Path], Path]] = {
    "dry run": dry_run,
    "choices of a start": choices_of_a_start,
    "--use-checkpoint-args": checkpoint_args,
    "--ckpt-verify size": size_verification,
    "commands": lambda folder: find_source(folder).path,
    "to-megatron": lambda folder: plan_megatron_export(folder, None).path,
    "to-hf": lambda folder: plan_export(folder, ExportOptions()).path,
}
NAMES = {"dry run", "commands", "to-megatron", "to-hf"}


@pytest.mark.parametrize("name", [COMMON_FILE, METADATA_FILE])
@pytest.mark.parametrize("reader", READERS)
def test_the_checkpoint_before_is_read(saved: Path, reader: str, name: str, capsys) -> None:
    for path, index, bit in flips(saved, name):
        flip(path, index, bit)
        try:
            assert READERS[reader](saved) == checkpoint_path(saved, STEP), (index, bit)
        finally:
            flip(path, index, bit)
        output = capsys.readouterr()
        if reader in NAMES:
            assert f"{path.parent} is damaged ({name} is damaged" in output.out + output.err, (index, bit)
        if reader == "dry run":
            assert f"resumes from step {STEP} " in output.out


@pytest.mark.parametrize("command", ["list", "verify", "show", "hash"])
def test_the_checkpoint_tool_names_it(saved: Path, command: str, capsys) -> None:
    for path, index, bit in flips(saved, COMMON_FILE):
        flip(path, index, bit)
        try:
            assert checkpoint.main([command, str(saved)]) == 74, (index, bit)
        finally:
            flip(path, index, bit)
        output = capsys.readouterr()
        assert f"{COMMON_FILE} is damaged" in output.out + output.err, (index, bit)


def test_a_step_that_is_asked_for_is_not_replaced(saved: Path, capsys) -> None:
    path, index, bit = flips(saved, COMMON_FILE)[-1]
    flip(path, index, bit)
    try:
        with pytest.raises(
            CheckpointError, match=f"no complete checkpoint of step {NEWEST}:\n.*{COMMON_FILE} is damaged"
        ):
            find_source(saved, NEWEST)
        flags = f"--dry-run {RUN} {MODEL} --tokenizer-type NullTokenizer --load {saved} --ckpt-step {NEWEST}"
        assert pretrain.main(flags.split()) == 74
        assert f"no complete checkpoint of step {NEWEST}" in capsys.readouterr().err
    finally:
        flip(path, index, bit)


@pytest.mark.parametrize(
    "change",
    [
        {"samples": {"num_samples": 7}},
        {"samples": {"num_samples": 7, "sha256": "", "seq_length": 32, "seed": 1, "sources": [{"prefix": "a"}]}},
        {"config": '{"model": {"num_layer": 2}}'},
        {"config": 7},
        {"history": {}},
        {"history": {"skipped": (), "num_in_row": "1", "num_rollbacks": 0, "window": ()}},
        {"step": "7"},
        {"layout": None},
        {"schedule": 7},
        {"schedule": {}},
        {"schedule": {"num_steps": 0, "max_lr": "0.1"}},
        {"schedule": {"num_steps": 0, "lr_decay_style": 1}},
        {"grad_factor": "1"},
        {"origin": {}},
        {"local_scales": 2},
        {"local_scales": [2, None]},
        {"gradient_residual_places": 7},
        {"extensions": 7},
        {"extensions": {"LayerGuard": 7}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_values_of_another_form_are_an_error_of_the_checkpoint(saved: Path, tmp_path: Path, change: dict) -> None:
    """Of a checkpoint whose hashes fit."""
    path = Path(shutil.copytree(checkpoint_path(saved, STEP), tmp_path / "other"))
    common = torch.load(path / COMMON_FILE, weights_only=True) | change
    torch.save(common, path / COMMON_FILE)
    before = read_manifest(path)
    write_manifest(path, build_manifest(path, before.step, before.consumed_samples, before.layout))
    with pytest.raises(CheckpointError, match=f"{path} cannot be read as a checkpoint: "):
        load_common_state(path)
