"""Reading a checkpoint never runs code of it: the one place where its bytes become Python objects.

megatron-core 0.16 and torch unpickle three things. `common.pt` is read with torch's `weights_only`, if the environment
does not say otherwise. `.metadata` goes through plain pickle, and so does every object that is no tensor (random state,
Transformer Engine's extra state): a crafted checkpoint runs what it likes. `.metadata` also says in which files tensors
are, and may say any file of the machine. Here pickle meets the few classes that metadata is made of, objects are read
with `weights_only`, and files are plain ones of the checkpoint's own folder, whose archives hold no more than their
size.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from megatron.core.safe_globals import register_safe_globals
from torch.distributed import checkpoint
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megafp8.errors import CheckpointError

# torch then reads everything with plain pickle, whatever the caller asks for.
UNSAFE_VARIABLE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
METADATA, COMMON, FORMAT = ".metadata", "common.pt", "metadata.json"

CHECKPOINT = "torch.distributed.checkpoint"
ALLOWED = frozenset(
    [
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
        (f"{CHECKPOINT}.filesystem", "_StorageInfo"),
        *((f"{CHECKPOINT}.metadata", name) for name in (
            "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
            "ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
        )),
        # megatron-core's own writer also keeps the plans that a checkpoint was written by.
        *((f"{CHECKPOINT}.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        (f"{CHECKPOINT}.filesystem", "_StoragePrefix"),
    ]
)  # fmt: skip


def check_before_reading(path: Path) -> None:
    """Refuse what would be read before anything else can be looked at; call it before a checkpoint is opened.

    Raises:
        CheckpointError: the environment turns torch's protection off, or a file is not what it should be.
    """
    if os.environ.get(UNSAFE_VARIABLE, "0").lower() not in ("0", "", "n", "no", "false"):
        raise CheckpointError(
            f"{UNSAFE_VARIABLE}={os.environ[UNSAFE_VARIABLE]} lets checkpoints run code while they are loaded: unset it"
        )
    register_safe_globals()
    for name in (FORMAT, METADATA, COMMON):
        check_plain_file(path, name)
    common = path / COMMON
    if common.exists():
        with open(common, "rb") as stream:
            check_archive(stream, common.stat().st_size, COMMON)


def check_plain_file(folder: Path, name: str) -> None:
    """Refuse a name that leads out of the folder, or to a link, a pipe or a device. What is absent passes.

    Raises:
        CheckpointError: it does.
    """
    path = folder / name
    if Path(name).name != name or path.is_symlink() or (path.exists() and not path.is_file()):
        raise CheckpointError(f"{folder} names {name!r} as one of its files: it has to be a plain file in that folder")


def check_archive(stream: IO[bytes], num_bytes: int, name: str) -> None:
    """Refuse a torch archive that holds more than it is long: torch writes no compressed ones.

    Raises:
        CheckpointError: it is compressed, or its lengths overlap.
        zipfile.BadZipFile: it is no archive.
    """
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise CheckpointError(f"{name} has compressed parts, which torch does not write")
    if sum(member.file_size for member in members) > num_bytes:
        raise CheckpointError(f"{name} says that it holds more than its {num_bytes} bytes")
    stream.seek(0)


class MetadataUnpickler(pickle.Unpickler):
    """Knows the classes that a checkpoint's metadata is made of, and no function that does anything.

    `getattr` finds members of enums only: Python 3.11.0 to 3.11.3 pickle them as `getattr(class, name)`.
    """

    def find_class(self, module: str, name: str) -> Any:
        """The class of a name.

        Raises:
            pickle.UnpicklingError: metadata has no such class.
        """
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"{METADATA} asks for {module}.{name}, which is refused: it could run code")
        return super().find_class(module, name)


def enum_member(owner: Any, name: Any) -> enum.Enum:
    """What Python 3.11.0 to 3.11.3 pickle a member of an enum as, in the place of `getattr(owner, name)`.

    Raises:
        pickle.UnpicklingError: it is not a member of an allowed enum.
    """
    is_allowed = isinstance(owner, enum.EnumMeta) and (owner.__module__, owner.__qualname__) in ALLOWED
    if not is_allowed or type(name) is not str or name not in owner.__members__:
        raise pickle.UnpicklingError(
            f"{METADATA} asks for builtins.getattr of something else than a member of an enum, which is refused: "
            "it could run code"
        )
    return owner.__members__[name]


class SafeReader(CachedMetadataFileSystemReader):
    """Reads files of its own folder only, and metadata without running it."""

    def read_metadata(self) -> Metadata:
        """The metadata, checked; the file is read once.

        Raises:
            CheckpointError: it names files outside the folder.
            pickle.UnpicklingError: it holds something else than metadata.
        """
        if self._cached_metadata is None:
            with open(self.path / METADATA, "rb") as stream:
                metadata = MetadataUnpickler(stream).load()
            self._check(metadata)
            self._cached_metadata = metadata
        return self._cached_metadata

    def _check(self, metadata: Any) -> None:
        """Refuse what is no metadata, and files that are not the checkpoint's own."""
        places = getattr(metadata, "storage_data", None)
        if type(metadata) is not Metadata or not isinstance(places, dict):
            raise CheckpointError(f"{self.path}: {METADATA} holds a {type(metadata).__name__} and no metadata")
        for name in {place.relative_path for place in places.values()}:
            check_plain_file(self.path, name)
        for place in places.values():
            if place.transform_descriptors or min(place.offset, place.length) < 0:
                raise CheckpointError(f"{self.path}: {METADATA} has a part that nobody writes: {place}")

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        part = FilePart(file, sinfo.offset, sinfo.length)
        check_archive(part, sinfo.length, sinfo.relative_path)
        return part


class FilePart(io.RawIOBase):
    """A part of an open file as a file. (torch's own goes the wrong way when it seeks from the end.)

    Args:
        file: unbuffered or buffered; nobody else reads it meanwhile.
        start: first byte.
        length: in bytes.
    """

    def __init__(self, file: IO[bytes], start: int, length: int):
        super().__init__()
        self._file, self._start, self._length = file, start, length
        self._position = 0

    def readable(self) -> bool:
        """It is for reading."""
        return True

    def seekable(self) -> bool:
        """It is for jumping about, too."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a place.

        Raises:
            OSError: it lies before the part.
        """
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if position < 0:
            raise OSError(f"cannot seek to {position}, before the start")
        self._position = position
        return position

    def tell(self) -> int:
        """The place, from the start of the part."""
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer as far as the part goes; the number of bytes read."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        self._file.seek(self._start + self._position)
        num_bytes = self._file.readinto(view) or 0  # type: ignore[attr-defined]
        self._position += num_bytes
        return num_bytes


class SafePlanner(strategies.MCoreLoadPlanner):
    """megatron-core's, but objects are read with `weights_only`."""

    def load_bytes(self, read_item: Any, value: IO[bytes]) -> None:
        """Take an object."""
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


class SafeStrategy(strategies.TorchDistLoadShardedStrategy):
    """megatron-core's way of loading with the reader and the planner above; it names its own inside its functions."""

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> dict[str, Any]:
        """Read what the state dictionary asks for."""
        tensors = [leaf for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedTensor)]
        flat, mapping, names = strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        wanted = strategies.mcore_to_pyt_state_dict(flat, True)
        planner = SafePlanner(
            shapes_validation_sharded_tensors=[each for each in tensors if not each.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={each.key: each for each in tensors if each.allow_shape_mismatch},
        )
        # As megatron-core does: torch's newer `load` takes a quarter longer to fill the same tensors.
        checkpoint.load_state_dict(wanted, SafeReader(checkpoint_dir), planner=planner)
        read = {key: strategies._unwrap_pyt_sharded_tensor(value) for key, value in wanted.items()}
        nested = strategies._replace_sharded_keys_with_state_dict_keys(read, mapping, names)
        strategies._restore_dict_types(nested, sharded_state_dict)
        return nested

    def load_tensors_metadata(self, checkpoint_dir: Path, metadata: Metadata | None = None) -> dict[str, Any]:
        """Names, shapes and types of the tensors."""
        return super().load_tensors_metadata(checkpoint_dir, metadata or SafeReader(checkpoint_dir).read_metadata())

    def load_sharded_metadata(self, checkpoint_dir: Path) -> dict[str, Any]:
        """The same with the objects that are no tensors."""
        metadata = SafeReader(checkpoint_dir).read_metadata()
        objects = (ShardedObject.empty_from_unique_key(key) for key in object_keys(metadata))
        return {each.unique_key: each for each in objects} | self.load_tensors_metadata(checkpoint_dir, metadata)


def object_keys(metadata: Metadata) -> Iterable[str]:
    """The keys of what is no tensor."""
    return [key for key, kind in metadata.state_dict_metadata.items() if isinstance(kind, BytesStorageMetadata)]
