"""Writes safetensors files one tensor at a time.

The library's own function takes all tensors of a file at once. Names, shapes and dtypes are known before the first
tensor is made, and so are their places in the file: the header is written first, and each tensor where it belongs.
Memory holds one batch of tensors, however large the file is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megafp8.checkpoint.convert.safetensors_files import (
    INDEX_FILE,
    SAFETENSORS_DTYPES,
    SINGLE_FILE,
    TensorSpec,
    safetensors,
    write_json,
)
from megafp8.checkpoint.directory import SPARE_BYTES
from megafp8.errors import CheckpointError

DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorBatch:
    """Tensors that are made and written together.

    Attributes:
        tensors: specifications by name.
        make: returns the tensors, contiguous.
    """

    tensors: dict[str, TensorSpec]
    make: Callable[[], dict[str, Tensor]]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor_bytes(each) for each in self.tensors.values())


def tensor_bytes(spec: TensorSpec) -> int:
    """Return the size of a tensor."""
    return torch.Size(spec.shape).numel() * spec.dtype.itemsize


def write_batches(
    folder: Path, batches: Sequence[TensorBatch], max_file_bytes: int, on_bytes: Callable[[int], Any]
) -> None:
    """Write safetensors files, with an index if there is more than one.

    Args:
        max_file_bytes: of tensors per file; a larger batch gets a separate file.
        on_bytes: called with the size of each batch that was written.

    Raises:
        CheckpointError: the disk has not enough free space, or a file cannot be written.
    """
    library, shards = safetensors(), split_into_files(batches, max_file_bytes)
    num_bytes, free = sum(batch.num_bytes for batch in batches), shutil.disk_usage(folder).free
    if num_bytes + SPARE_BYTES > free:
        raise CheckpointError(f"{folder} has {free / 1e9:.3f} GB free and the files take {num_bytes / 1e9:.3f} GB")
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        try:
            write_file(folder / file, shard, on_bytes)
            with library.safe_open(folder / file, framework="pt") as written:  # checks the header
                weight_map |= dict.fromkeys(written.keys(), file)
        except (OSError, library.SafetensorError) as error:
            raise CheckpointError(f"{folder / file} cannot be written: {error}") from error
    if len(shards) > 1:
        write_json(
            folder / INDEX_FILE, {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        )


def split_into_files(batches: Sequence[TensorBatch], max_bytes: int) -> list[list[TensorBatch]]:
    """Divide batches over files, in order."""
    shards: list[list[TensorBatch]] = [[]]
    room = max_bytes
    for batch in batches:
        if shards[-1] and batch.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(batch)
        room -= batch.num_bytes
    return shards


def write_file(path: Path, batches: Sequence[TensorBatch], on_bytes: Callable[[int], Any]) -> None:
    """Write one file: the length of the header (8 bytes), the header as JSON, then the tensors without gaps.

    Raises:
        CheckpointError: a batch makes other tensors than it promises.
        OSError: the file cannot be written.
    """
    specs = {name: spec for batch in batches for name, spec in batch.tensors.items()}
    # Wider dtypes come first, so that every tensor is aligned to its own elements.
    offsets, end = {}, 0
    for name in sorted(specs, key=lambda name: -specs[name].dtype.itemsize):
        offsets[name] = end
        end += tensor_bytes(specs[name])
    entries = {
        name: {
            "dtype": DTYPE_NAMES[specs[name].dtype],
            "shape": list(specs[name].shape),
            "data_offsets": [begin, begin + tensor_bytes(specs[name])],
        }
        for name, begin in offsets.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % HEADER_ALIGNMENT)
    with open(path, "xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for batch in batches:
            write_batch(file, batch, 8 + len(header), offsets)
            on_bytes(batch.num_bytes)


def write_batch(file: BinaryIO, batch: TensorBatch, start: int, offsets: dict[str, int]) -> None:
    """Make the tensors of a batch and write them.

    Args:
        start: position of the first tensor in the file.
        offsets: of the tensors from there, in bytes.
    """
    made = batch.make()
    found = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()}
    if found != batch.tensors:
        raise CheckpointError(f"made {found}, expected {batch.tensors}")
    for name, tensor in made.items():
        file.seek(start + offsets[name])
        file.write(memoryview(tensor.flatten().view(torch.uint8).numpy()))
