"""Files that a conversion copies: regular ones of limited size, which belong to the model, or nothing is written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import LLAMA, random_weights, write_hf_folder

from megafp8.checkpoint.convert import tokenizer as tokenizer_files
from megafp8.checkpoint.convert.companion_files import read_companion
from megafp8.checkpoint.convert.origin import read_generation
from megafp8.checkpoint.convert.safetensors_files import publish_folder
from megafp8.checkpoint.convert.tokenizer import copy_file, find_tokenizer
from megafp8.cli import convert
from megafp8.errors import CheckpointError

COMPANION = "special_tokens_map.json"


def test_a_link_within_a_cache_of_the_hub_is_read(tmp_path: Path) -> None:
    blob, folder = tmp_path / "models--a--b/blobs/0123", tmp_path / "models--a--b/snapshots/main"
    blob.parent.mkdir(parents=True)
    folder.mkdir(parents=True)
    blob.write_bytes(b"{}")
    (folder / COMPANION).symlink_to("../../blobs/0123")
    (folder / "same").symlink_to(COMPANION)
    (tmp_path / "linked").symlink_to(folder)
    for path in (folder / COMPANION, folder / "same", tmp_path / "linked" / COMPANION):
        assert read_companion(path) == b"{}"
    assert read_companion(folder / "absent") is None


def link_to_a_key(path: Path) -> None:
    (path.parent.parent / "key").write_text("secret")
    path.symlink_to("../key")


def sparse_file(path: Path) -> None:
    with open(path, "wb") as stream:
        stream.truncate(1 << 40)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (link_to_a_key, "is a link to .*/key, outside of the model's folder"),
        (lambda path: path.symlink_to("/dev/zero"), "is a link to /dev/zero, outside"),
        (lambda path: path.symlink_to("gone"), "cannot be copied: No such file"),
        (lambda path: path.symlink_to(path.name), "cannot be copied: Too many levels"),
        (os.mkfifo, "cannot be copied: it is a named pipe, not a regular file"),
        (Path.mkdir, "cannot be copied: it is a directory, not a regular file"),
        (sparse_file, "cannot be copied: it has more than 268,435,456 bytes"),
    ],
)
def test_other_files_are_refused(make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    for name in (COMPANION, "generation_config.json"):
        make(folder / name)
    for read in (find_tokenizer, read_generation, lambda folder: copy_file(folder / COMPANION, tmp_path / "copy")):
        with pytest.raises(CheckpointError, match=message):
            read(folder)
    assert not (tmp_path / "copy").exists()


def test_a_tokenizer_itself_may_be_elsewhere(tmp_path: Path) -> None:
    """Its content is checked by the library that reads it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "vocab").write_text("{}")
    (tmp_path / "model/tokenizer.json").symlink_to("../vocab")
    copy_file(tmp_path / "model/tokenizer.json", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "{}"


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(source: Path, destination: Path) -> None:
        destination.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(destination))

    write_hf_folder(tmp_path / "theirs", LLAMA, random_weights(LLAMA, torch.bfloat16))
    (tmp_path / "theirs/vocab.json").write_text('{"<|endoftext|>": 0, "a": 1}')
    (tmp_path / "theirs/merges.txt").write_text("")
    monkeypatch.setattr(tokenizer_files, "copy_file", fill)
    assert convert.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 74
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith(f"convert: {tmp_path / 'ours'} was not written: [Errno 28] No space left on device")
    assert {path.name for path in tmp_path.iterdir()} == {"theirs"}


def test_only_errors_of_files_are_those_of_a_conversion(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="ours was not written: .*gone"), publish_folder(tmp_path / "ours"):
        (tmp_path / "gone").read_bytes()
    with pytest.raises(KeyError), publish_folder(tmp_path / "ours"):
        raise KeyError
