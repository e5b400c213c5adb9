"""Safe deserialization of checkpoints: loading never runs code from the checkpoint.

torch and megatron-core unpickle three parts of a checkpoint. `common.pt` is read with `weights_only`, unless an
environment variable disables it. `.metadata` and every non-tensor object (RNG state, Transformer Engine's extra state)
are unpickled without restriction, so a crafted checkpoint can run code. `.metadata` can also refer to any file of the
machine.

Here `.metadata` is unpickled with an allowlist of classes, and objects are read with `weights_only`. Files must be
plain files of the checkpoint's folder, and their archives may not expand beyond their size.
"""

from __future__ import annotations

import enum
import io
import os
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Optional, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from megatron.core.safe_globals import register_safe_globals
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.utils import _ReaderView
from torch.futures import Future

from megafp8.device.collective_errors import call_on_all_ranks, gather_on_rank_0
from megafp8.errors import CheckpointError

# With this variable torch.load ignores `weights_only` and unpickles everything.
UNSAFE_LOAD_VARIABLE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
METADATA_FILE, COMMON_FILE, FORMAT_FILE = ".metadata", "common.pt", "metadata.json"

DCP = "torch.distributed.checkpoint"
ALLOWED_CLASSES = frozenset(
    [
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
        (f"{DCP}.filesystem", "_StorageInfo"),
        *((f"{DCP}.metadata", name) for name in (
            "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
            "ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
        )),
        # megatron-core's own writer also stores the save plans.
        *((f"{DCP}.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
        (f"{DCP}.filesystem", "_StoragePrefix"),
    ]
)  # fmt: skip


def check_before_reading(path: Path, needs_common: bool = True) -> None:
    """Check everything that is read before the metadata; call it before opening a checkpoint.

    Raises:
        CheckpointError: the environment disables `weights_only`, or a file is missing or not a plain file or archive.
    """
    value = os.environ.get(UNSAFE_LOAD_VARIABLE, "0")
    if value.lower() not in ("0", "", "n", "no", "false"):
        raise CheckpointError(
            f"{UNSAFE_LOAD_VARIABLE}={value} allows checkpoints to run code while they are loaded: unset it"
        )
    register_safe_globals()
    for name in (FORMAT_FILE, METADATA_FILE, COMMON_FILE):
        check_plain_file(path, name)
    common = path / COMMON_FILE
    if common.exists():
        with open(common, "rb") as stream:
            check_archive(stream, common.stat().st_size, COMMON_FILE)
    elif needs_common and (path / FORMAT_FILE).exists():
        # megatron-core 0.19 would search the other files for its content, and unpickle their metadata.
        raise CheckpointError(f"{path} has no {COMMON_FILE}: the file is lost, or another program wrote the checkpoint")


def check_plain_file(folder: Path, name: str) -> None:
    """Raise unless a name is that of a regular file in the folder. An absent file passes.

    Raises:
        CheckpointError: the name leads out of the folder, or to a link, a pipe or a device.
    """
    path = folder / name
    if Path(name).name != name or path.is_symlink() or (path.exists() and not path.is_file()):
        raise CheckpointError(f"{folder} lists the file {name!r}, which is not a regular file in that folder")


def check_archive(stream: IO[bytes], num_bytes: int, name: str) -> None:
    """Raise if a torch archive expands to more than its size. torch writes uncompressed archives only.

    Raises:
        CheckpointError: it is compressed, or its members overlap.
        zipfile.BadZipFile: it is not an archive.
    """
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise CheckpointError(f"{name} has compressed entries, which torch does not write")
    if sum(member.file_size for member in members) > num_bytes:
        raise CheckpointError(f"{name} declares more data than its {num_bytes} bytes")
    stream.seek(0)


class MetadataUnpickler(pickle.Unpickler):
    """Unpickler with an allowlist of the classes that checkpoint metadata consists of.

    `getattr` is restricted to enum members: Python 3.11.0 to 3.11.3 pickle them as `getattr(class, name)`.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class.

        Raises:
            pickle.UnpicklingError: the class is not allowed.
        """
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if (module, name) not in ALLOWED_CLASSES:
            raise pickle.UnpicklingError(
                f"{METADATA_FILE} refers to {module}.{name}, which is refused because it could run code"
            )
        return super().find_class(module, name)


def enum_member(owner: Any, name: Any) -> enum.Enum:
    """Return an enum member; the replacement of `getattr` in `MetadataUnpickler`.

    Raises:
        pickle.UnpicklingError: it is not a member of an allowed enum.
    """
    is_allowed = isinstance(owner, enum.EnumMeta) and (owner.__module__, owner.__qualname__) in ALLOWED_CLASSES
    if not is_allowed or type(name) is not str or name not in owner.__members__:
        raise pickle.UnpicklingError(
            f"{METADATA_FILE} refers to builtins.getattr of something other than an enum member, which is refused "
            "because it could run code"
        )
    return owner.__members__[name]


class SafeReader(FileSystemReader):
    """Storage reader that unpickles metadata safely and reads files of its own folder only."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._cached_metadata: Optional[Metadata] = None

    def read_metadata(self) -> Metadata:
        """Return the checked metadata. The file is read once.

        Raises:
            CheckpointError: it refers to files outside the folder.
            pickle.UnpicklingError: it contains other classes than metadata.
        """
        if self._cached_metadata is None:
            with open(self.path / METADATA_FILE, "rb") as stream:
                metadata = MetadataUnpickler(stream).load()
            self._check(metadata)
            self._cached_metadata = metadata
        return self._cached_metadata

    def _check(self, metadata: Any) -> None:
        """Raise unless this is metadata that refers to plain files of the checkpoint's folder only."""
        storage_data = getattr(metadata, "storage_data", None)
        if type(metadata) is not Metadata or not isinstance(storage_data, dict):
            raise CheckpointError(
                f"{self.path}: {METADATA_FILE} contains a {type(metadata).__name__} instead of metadata"
            )
        for name in {info.relative_path for info in storage_data.values()}:
            check_plain_file(self.path, name)
        for info in storage_data.values():
            if info.transform_descriptors or min(info.offset, info.length) < 0:
                raise CheckpointError(f"{self.path}: {METADATA_FILE} has an unexpected entry: {info}")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each tensor after the one before it is freed: torch has both in memory."""
        for item in plan.items:
            super().read_data(replace(plan, items=[item]), planner)
        return super().read_data(replace(plan, items=[]), planner)

    def read_elements(self, info: Any, first: int, num_elements: int) -> torch.Tensor:
        """Return elements from `first` on of one stored chunk of a tensor, in the order of its elements.

        Only these are read: a chunk may be a complete matrix of several GB.

        Args:
            info: where the chunk is, from the metadata's `storage_data`.

        Returns:
            The elements in the stored dtype. Shape: (num_elements,).

        Raises:
            CheckpointError: the chunk has fewer elements.
        """
        with open(self.path / info.relative_path, "rb") as file:
            archive = self._slice_file(file, info)
            with FakeTensorMode():  # shape and place only
                stored = torch.load(archive, map_location="cpu", weights_only=True)
            if first + num_elements > stored.numel():
                raise CheckpointError(
                    f"{self.path / info.relative_path} has a tensor of {stored.numel()} elements only"
                )
            place = getattr(stored.untyped_storage(), "_checkpoint_offset", None)
            if place is None or not stored.is_contiguous():  # torch 2.6 does not tell the place
                archive.seek(0)
                stored = torch.load(archive, map_location="cpu", weights_only=True)
                return cast(torch.Tensor, stored.flatten()[first : first + num_elements])
            content = torch.empty(num_elements * stored.itemsize, dtype=torch.uint8)
            file.seek(info.offset + place + (stored.storage_offset() + first) * stored.itemsize)
            if file.readinto(content.numpy()) != len(content):
                raise CheckpointError(f"{file.name} ends within a tensor")
        return content.view(stored.dtype)

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        file_slice = cast(IO[bytes], FileSlice(cast(io.IOBase, file), sinfo.offset, sinfo.length))
        check_archive(file_slice, sinfo.length, sinfo.relative_path)
        return file_slice


class FileSlice(_ReaderView):
    """A byte range of an open file as a file.

    torch's own view takes offsets from the end with the opposite sign, and reads beyond the slice after a seek past its
    end.
    """

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Change the position within the slice, at most to its end; return it.

        Raises:
            OSError: the position is before the start.
        """
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self.len}[whence]
        if position < 0:
            raise OSError(f"cannot seek to {position}, before the start")
        return super().seek(min(position, self.len)) - self.offset


class SafeLoadPlanner(strategies.MCoreLoadPlanner):
    """megatron-core's load planner with `weights_only` for objects."""

    def load_bytes(self, read_item: Any, value: IO[bytes]) -> None:
        """Load an object."""
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


def is_on_meta(leaf: Any) -> bool:
    """Return whether a leaf of a sharded state dictionary is a tensor without memory."""
    return isinstance(leaf, ShardedTensor) and leaf.data is not None and leaf.data.is_meta


def read_boxes(reader: SafeReader, boxes: Sequence[ShardedTensor]) -> None:
    """Read parts of saved tensors into their data, on this rank only."""
    flat: dict[str, list[ShardedTensor]] = {}
    for box in boxes:
        flat.setdefault(box.key, []).append(box)
    state = strategies.mcore_to_pyt_state_dict(flat, True)
    mismatched = {box.key: box for box in boxes if box.allow_shape_mismatch}
    planner = SafeLoadPlanner(allow_shape_mismatch_sharded_tensors=mismatched)
    checkpoint.load_state_dict(state, reader, no_dist=True, planner=planner)


def check_shards(sharded: dict[str, Any], common: Optional[dict[str, Any]] = None) -> None:
    """Check that the shards of all ranks are complete tensors; all ranks call it.

    megatron-core would collect the shards of all ranks on every rank.

    Args:
        common: plain values, which should be the same on all ranks.

    Raises:
        CheckpointError: a part of a tensor is missing, or belongs to several ranks.
    """
    by_rank = gather_on_rank_0(lambda: [leaf.without_data() for leaf in nested_values(sharded)])
    call_on_all_ranks(lambda: validate_sharding_integrity(by_rank, common))


class SafeLoadStrategy(strategies.TorchDistLoadShardedStrategy):
    """megatron-core's load strategy with `SafeReader` and `SafeLoadPlanner`, which it does not let callers choose."""

    def __init__(self) -> None:
        super().__init__()
        # megatron-core dequantizes FP8 weights before the load. Since 0.19 its planner would, but only those of
        # Transformer Engine.
        self.stream_ckpt_dequant = False

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, *unused: Any) -> dict[str, Any]:
        """Load what the sharded state dictionary requests, except for tensors on the meta device."""
        check_shards(sharded_state_dict)
        tensors = [leaf for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedTensor)]
        flat, mapping, names = strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        read = {key: [leaf for leaf in leaves if not is_on_meta(leaf)] for key, leaves in flat.items()}
        state = strategies.mcore_to_pyt_state_dict({key: leaves for key, leaves in read.items() if leaves}, True)
        planner = SafeLoadPlanner(
            shapes_validation_sharded_tensors=[each for each in tensors if not each.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={each.key: each for each in tensors if each.allow_shape_mismatch},
        )
        # Deprecated in torch, but `checkpoint.load` takes 25% longer for the same tensors. megatron-core uses it, too.
        checkpoint.load_state_dict(state, SafeReader(checkpoint_dir), planner=planner)
        loaded = {}
        for key, leaves in flat.items():
            values = iter(strategies._unwrap_pyt_sharded_tensor(state[key]) if key in state else ())
            loaded[key] = [leaf.data if is_on_meta(leaf) else next(values) for leaf in leaves]
        nested = strategies._replace_sharded_keys_with_state_dict_keys(loaded, mapping, names)
        strategies._restore_dict_types(nested, sharded_state_dict)
        return nested

    def load_tensors_metadata(self, checkpoint_dir: Path, metadata: Metadata | None = None) -> dict[str, Any]:
        """Return names, shapes and dtypes of the tensors."""
        return super().load_tensors_metadata(checkpoint_dir, metadata or SafeReader(checkpoint_dir).read_metadata())

    def load_sharded_metadata(self, checkpoint_dir: Path) -> dict[str, Any]:
        """Return the metadata of tensors and objects."""
        metadata = SafeReader(checkpoint_dir).read_metadata()
        objects = (
            ShardedObject.empty_from_unique_key(key)
            for key, kind in metadata.state_dict_metadata.items()
            if isinstance(kind, BytesStorageMetadata)
        )
        return {each.unique_key: each for each in objects} | self.load_tensors_metadata(checkpoint_dir, metadata)
