"""What a checkpoint says of itself, read without its tensors.

What a checkpoint holds, told without building its model; and a manifest for one that has none.
"""

from __future__ import annotations

import pickle
import platform
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.safe_globals import register_safe_globals
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megafp8.checkpoint.manifest import MANIFEST, NAME, FileEntry, Manifest, relative_files, write_manifest
from megafp8.checkpoint.progress import History
from megafp8.checkpoint.serialization import COMMON, SafeReader, SafeStrategy, check_before_reading
from megafp8.checkpoint.state_dict import EMBEDDING
from megafp8.config import settings
from megafp8.config.schema import RunConfig
from megafp8.device.collective_errors import raise_peer_lost, reason
from megafp8.errors import CheckpointError, PeerLost
from megafp8.utils.files import file_sha256
from megafp8.utils.formatting import utc_now

# What megatron-core and torch raise on a file that is missing, cut off or of another model.
UNREADABLE = (
    CheckpointingException, CheckpointException, OSError, RuntimeError, AttributeError, EOFError, KeyError,
    pickle.UnpicklingError, TypeError, ValueError, IndexError, ImportError, zipfile.BadZipFile, RecursionError,
    MemoryError,
)  # fmt: skip


def read_config(path: Path) -> RunConfig:
    """The configuration that a checkpoint was made with, without reading its tensors.

    Raises:
        CheckpointError: not a checkpoint of this project.
    """
    return settings.from_json(common_state(path)["config"])


def common_state(path: Path) -> dict[str, Any]:
    """The plain values of a checkpoint."""
    with readable(path):
        state = dist_checkpointing.load_common_state_dict(str(path))
    if "config" not in state:
        raise CheckpointError(f"{path} is a megatron-core checkpoint without megafp8's configuration")
    return state


def check_readable(path: Path) -> None:
    """Read back what a save has written besides tensors.

    Another version of Python or torch may write a form that the safe loader refuses. The save has to fail then: the run
    still has its weights.

    Raises:
        CheckpointError: a load would refuse it.
    """
    register_safe_globals()
    try:
        SafeReader(path).read_metadata()
        torch.load(path / COMMON, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise CheckpointError(
            f"it was written, but cannot be read back with Python {platform.python_version()} and torch "
            f"{torch.__version__} (constraints.txt has the versions that were tested): {reason(error)}"
        ) from error


def history_in(common: dict[str, Any]) -> History:
    """What a checkpoint's plain values tell of bad numbers; nothing in one that is older than that."""
    return History.from_plain(common["history"]) if "history" in common else History()


def embedding_rows(path: Path) -> int:
    """Rows of the embedding in a checkpoint: the padded vocabulary of the run that made it.

    megatron-core loads an embedding of another size without a word, so whoever can be wrong about it should compare.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    with readable(path):
        return dist_checkpointing.load_tensors_metadata(str(path), SafeStrategy())[EMBEDDING].global_shape[0]


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Within, what a missing, damaged or other checkpoint raises becomes a CheckpointError, and none runs code."""
    try:
        check_before_reading(path)
        yield
    except (CheckpointError, PeerLost):
        raise
    except UNREADABLE as error:
        raise_peer_lost(error)
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {reason(error)}") from error


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
