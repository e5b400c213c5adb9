"""What a checkpoint holds, told without building its model; and a manifest for one that has none."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megafp8.checkpoint.manifest import MANIFEST, NAME, FileEntry, Manifest, relative_files, write_manifest
from megafp8.checkpoint.reading import common_state, history_in, readable
from megafp8.checkpoint.safe_load import SafeReader
from megafp8.checkpoint.skipped import History
from megafp8.data.atomic import file_sha256
from megafp8.errors import CheckpointError
from megafp8.telemetry.records import utc_now

OPTIMIZER_PREFIX = "optimizer."


@dataclass(frozen=True)
class TensorShape:
    """A tensor of a checkpoint: its name there, whole shape, type and number of parts."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    num_parts: int


@dataclass(frozen=True)
class Contents:
    """What is in a checkpoint.

    Attributes:
        config: the run's settings as JSON text.
        samples: which samples were read, where that is known.
        history: of bad numbers, with the samples that changed no weight.
        tensors: in the order of their names.
        objects: names of what is no tensor.
    """

    config: str
    samples: Any
    history: History
    tensors: tuple[TensorShape, ...]
    objects: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        """Elements of the weights, and of the buffers beside them."""
        weights = (tensor for tensor in self.tensors if not tensor.name.startswith(OPTIMIZER_PREFIX))
        return sum(prod(tensor.shape) for tensor in weights)


def read_contents(path: Path) -> Contents:
    """Names, shapes and settings of a checkpoint; tensors are not read.

    Raises:
        CheckpointError: it cannot be read.
    """
    common = common_state(path)
    with readable(path):
        kinds = SafeReader(path).read_metadata().state_dict_metadata
        tensors = []
        for name, kind in sorted(kinds.items()):
            if isinstance(kind, TensorStorageMetadata):
                shape, dtype = tuple(kind.size), kind.properties.dtype
                size = prod(shape) * dtype.itemsize
                tensors.append(TensorShape(name, shape, str(dtype).removeprefix("torch."), size, len(kind.chunks)))
    objects = tuple(name for name, kind in sorted(kinds.items()) if not isinstance(kind, TensorStorageMetadata))
    return Contents(common["config"], common.get("samples"), history_in(common), tuple(tensors), objects)


def seal(path: Path) -> Manifest:
    """Write a manifest of a checkpoint's files as they are: for one that is older than manifests.

    Raises:
        CheckpointError: it has one, or is no checkpoint.
    """
    if (path / MANIFEST).exists():
        raise CheckpointError(f"{path} has a manifest already")
    match = NAME.fullmatch(path.resolve().name)
    if match is None:
        raise CheckpointError(f"{path} is not named as a checkpoint is: iter_ and at least seven digits")
    read_contents(path)
    common = common_state(path)
    if common["step"] != int(match[1]):
        raise CheckpointError(f"{path} holds step {common['step']}")
    files = {name: FileEntry((path / name).stat().st_size, file_sha256(path / name)) for name in relative_files(path)}
    manifest = Manifest(
        step=common["step"], consumed_samples=common["consumed_samples"], layout=tuple(common["layout"]),
        saved_at=utc_now(), files=files,
    )  # fmt: skip
    write_manifest(path, manifest)
    return manifest
