"""Files that a conversion copies: regular ones of limited size, which belong to the model, or nothing is written."""

from __future__ import annotations

import errno
import json
import os
import re
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
from megafp8.checkpoint.convert.to_huggingface import Export
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


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": '{"model": {"type": "BPE", "voc'}, "tokenizer.json is not a tokenizer.json"),
        ({"vocab.json": "[]", "merges.txt": ""}, "vocab.json and .*merges.txt are not a GPT-2 vocabulary"),
        ({"tokenizer.model": ""}, "tokenizer.model is not a SentencePiece model"),
    ],
)
def test_a_damaged_tokenizer_is_named(
    files: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = write_hf_folder(tmp_path / "theirs", LLAMA, random_weights(LLAMA, torch.bfloat16)), tmp_path / "ours"
    for name, text in files.items():
        (theirs / name).write_text(text)
    assert convert.main(["from-hf", str(theirs), str(ours)]) == 66
    assert re.search(f"{theirs}/{message}.*; repair the file", capsys.readouterr().err) and not ours.exists()


def test_a_tokenizer_without_an_end_of_document_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = write_hf_folder(tmp_path / "theirs", LLAMA, random_weights(LLAMA, torch.bfloat16))
    (theirs / "vocab.json").write_text('{"a": 0}')
    (theirs / "merges.txt").write_text("")
    assert convert.main(["from-hf", str(theirs), str(tmp_path / "ours")]) == 0
    assert "the folder has no tokenizer that megafp8 reads" in capsys.readouterr().out


def test_a_link_is_refused_before_the_weights_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = write_hf_folder(tmp_path / "theirs", LLAMA, random_weights(LLAMA, torch.bfloat16))
    model = {"type": "BPE", "vocab": {"</s>": 0, "a": 1}, "merges": []}
    (theirs / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (theirs / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert convert.main(["from-hf", str(theirs), str(tmp_path / "ours")]) == 0
    link_to_a_key(tmp_path / "ours/tokenizer" / COMPANION)
    monkeypatch.setattr(Export, "write", lambda *_: pytest.fail("it is written"))
    assert convert.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "back")]) == 74
    assert "outside of the model's folder" in capsys.readouterr().err


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
