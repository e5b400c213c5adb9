"""Files of transformers: read safely, written in shards, complete or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_folders import same, weights_in
from safetensors.torch import save_file
from torch import Tensor

from megafp8.checkpoint.convert.safetensors_files import (
    INDEX_FILE,
    SINGLE_FILE,
    TensorBatch,
    publish_folder,
    read_json,
    stored_tensors,
    write_batches,
)
from megafp8.errors import CheckpointError

WEIGHTS = {f"layer.{n}.weight": torch.full((4, 8), n, dtype=torch.bfloat16) for n in range(5)}


def pieces(weights: dict[str, Tensor]) -> list[TensorBatch]:
    return [
        TensorBatch(weight.nbytes, lambda name=name, weight=weight: {name: weight}) for name, weight in weights.items()
    ]


@pytest.mark.parametrize(("max_bytes", "num_files"), [(1000, 1), (128, 3), (1, 5)])
def test_shards(max_bytes: int, num_files: int, tmp_path: Path) -> None:
    counted: list[int] = []
    write_batches(tmp_path, pieces(WEIGHTS), max_bytes, counted.append)
    assert sum(counted) == 5 * 64 and len(list(tmp_path.glob("*.safetensors"))) == num_files
    assert same(weights_in(tmp_path), WEIGHTS)
    stored = stored_tensors(tmp_path)
    assert all(torch.equal(stored[name].load(), weight) for name, weight in WEIGHTS.items())
    (tmp_path / "other").touch()
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "other").stat().st_mode}
    if num_files == 1:
        assert not (tmp_path / INDEX_FILE).exists()
        return
    index = read_json(tmp_path / INDEX_FILE)
    assert index["metadata"]["total_size"] == 5 * 64
    assert set(index["weight_map"]) == set(WEIGHTS)
    assert set(index["weight_map"].values()) == {path.name for path in tmp_path.glob("*.safetensors")}
    assert f"model-00001-of-{num_files:05}.safetensors" in index["weight_map"].values()


def index_of(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def cut_off(folder: Path) -> None:
    save_file(WEIGHTS, folder / SINGLE_FILE)
    content = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(content[: len(content) // 2])


def of_another_kind(folder: Path) -> None:
    save_file({"x": torch.zeros(2, dtype=torch.float64)}, folder / SINGLE_FILE)


def stored_twice(folder: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.zeros(2)}, folder / name)
    index_of(folder, {"x": "a.safetensors", "y": "b.safetensors"})


def waits_for_a_writer(folder: Path) -> None:
    os.mkfifo(folder / "x.safetensors")
    index_of(folder, {"x": "x.safetensors"})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda folder: None, "neither model.safetensors nor"),
        (lambda folder: (folder / "pytorch_model.bin").write_bytes(b""), "a pickle, which could run code"),
        (cut_off, "cannot be read as safetensors"),
        (of_another_kind, "x is F64"),
        (stored_twice, "holds x twice"),
        (lambda folder: index_of(folder, {"x": "../model.safetensors"}), "names '../model.safetensors'"),
        (lambda folder: index_of(folder, {"x": "model.bin"}), "names 'model.bin'"),
        (lambda folder: index_of(folder, {"x": "gone.safetensors"}), "gone.safetensors cannot be read"),
        (lambda folder: index_of(folder, []), "has no weight_map"),
        (lambda folder: (folder / INDEX_FILE).write_text("[" * 100_000), "cannot be read as JSON"),
        (waits_for_a_writer, "x.safetensors cannot be read as safetensors: .* a named pipe"),
    ],
)
def test_damaged_files_are_refused(make: Callable[[Path], object], text: str, tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(CheckpointError, match=text):
        stored_tensors(tmp_path)


def test_a_folder_appears_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with pytest.raises(KeyError), publish_folder(path) as folder:
        (folder / "x").write_text("x")
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with publish_folder(path) as folder:
        (folder / "x").write_text("x")
        assert not path.exists()
        with pytest.raises(CheckpointError, match="another conversion writes it"), publish_folder(path):
            pass
    assert [file.name for file in tmp_path.iterdir()] == ["model"] and (path / "x").exists()
    with pytest.raises(CheckpointError, match="exists; give a folder that does not"), publish_folder(path):
        pass
