"""Checkpoint access without a model or process groups: write weights, and read single tensors.

Tensors are written and read one at a time, so memory holds only the current ones. megatron-core stacks equal tensors
of all layers in one tensor with the layer as dim 0, except for mixtures of experts. Here each layer's tensor has its
own name, such as `decoder.layers.0.mlp.linear_fc1.weight`.
"""

from __future__ import annotations

import io
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Optional

import torch
from megatron.core.dist_checkpointing.core import save_config
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megafp8.checkpoint import directory
from megafp8.checkpoint.manifest import FileEntry, build_manifest
from megafp8.checkpoint.metadata import check_readable, load_errors
from megafp8.checkpoint.save import BACKEND
from megafp8.checkpoint.serialization import COMMON_FILE, SafeLoadPlanner, SafeReader
from megafp8.checkpoint.state_dict import content_metadata
from megafp8.checkpoint.writer import HashingWriter
from megafp8.config.expert_layers import is_mixture
from megafp8.config.schema import RunConfig
from megafp8.config.settings import to_json
from megafp8.errors import CheckpointError

LAYER_PATTERN = re.compile(r"(^|\.)layers\.(\d+)\.")
IMPORT_STEP = 0
SINGLE_RANK_LAYOUT = (1, 1, 1)
STACKED_LAYERS_PATTERN = re.compile(r"(^|\.)layers\.(?!\d)")
MAX_LISTED_NAMES = 12
MAX_TENSORS = 1_000_000


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that a writer thread makes when it is written.

    Attributes:
        make: returns the tensor, of this shape and dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class CheckpointParts:
    """What a checkpoint is written from.

    Attributes:
        common: plain values, as in `save.build_state_dict`.
        sources: tensors by name.
        objects: other sharded values, by name.
    """

    common: Mapping[str, Any]
    sources: Mapping[str, LazyTensor]
    objects: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(source.num_bytes for source in self.sources.values())

    def reporting(self, on_bytes: Callable[[int], Any]) -> CheckpointParts:
        """Return parts that call `on_bytes` with the size of each tensor that was made."""

        def make(source: LazyTensor) -> Tensor:
            tensor = source.make()
            on_bytes(source.num_bytes)
            return tensor

        sources = {name: replace(source, make=partial(make, source)) for name, source in self.sources.items()}
        return replace(self, sources=sources)


def save_weights(
    folder: Path,
    config: RunConfig,
    sources: Mapping[str, LazyTensor],
    origin: Optional[str] = None,
    on_bytes: Callable[[int], Any] = lambda num_bytes: None,
) -> Path:
    """Save a weights-only checkpoint of step 0, as `--no-save-optim --no-save-rng` would.

    Args:
        sources: every weight of the model, by name.
        origin: where the model came from, as in `Progress`.
        on_bytes: called with the size of each tensor that was made.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: it cannot be written or read back, or a tensor does not match its source's shape or dtype.
    """
    common = {
        "step": IMPORT_STEP, "consumed_samples": 0, "samples": None, "origin": origin, "config": to_json(config),
        "layout": list(SINGLE_RANK_LAYOUT), "content_metadata": content_metadata(),
    }  # fmt: skip
    parts = CheckpointParts(common=common, sources=sources).reporting(on_bytes)
    return save_parts(folder, parts, has_stacks=not is_mixture(config.model))


def save_parts(folder: Path, parts: CheckpointParts, has_stacks: bool = True) -> Path:
    """Save a checkpoint from its parts.

    Args:
        parts: with step, consumed_samples and layout among the plain values.
        has_stacks: store equal tensors of all layers as one.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: as `save_weights`.
    """
    return save_files(folder, parts.common, parts.num_bytes, partial(write_files, parts=parts, has_stacks=has_stacks))


def save_files(
    folder: Path,
    common: Mapping[str, Any],
    num_bytes: int,
    write: Callable[[Path], dict[str, FileEntry]],
    merged: Optional[Mapping[str, Any]] = None,
) -> Path:
    """Save a checkpoint whose files a function writes; return its folder.

    Args:
        common: plain values with step, consumed_samples and layout.
        num_bytes: size of its tensors.
        write: writes all files except the manifest and returns the entries of the tensor files.
        merged: as in `Manifest`.

    Raises:
        CheckpointError: as `save_weights`.
    """
    step = common["step"]
    unfinished = directory.unfinished_path(folder, step)
    try:
        directory.make_unfinished_folder(folder, step, num_bytes)
        files = write(unfinished)
        check_readable(unfinished)
        manifest = build_manifest(unfinished, step, common["consumed_samples"], tuple(common["layout"]), files)
        return directory.publish(folder, step, replace(manifest, merged=merged))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def write_files(folder: Path, parts: CheckpointParts, has_stacks: bool = True) -> dict[str, FileEntry]:
    """Write all files of a checkpoint except the manifest; return the manifest entries of the tensor files."""
    items = build_write_items(parts.sources, has_stacks)
    source_by_index = {item.index: source for item, source in zip(items, parts.sources.values(), strict=True)}
    return write_items(
        folder, parts.common, items, lambda item: make_tensor(source_by_index[item.index], item), parts.objects
    )


def write_items(
    folder: Path,
    common: Mapping[str, Any],
    items: list[WriteItem],
    make: Callable[[WriteItem], Tensor],
    objects: Mapping[str, Any],
) -> dict[str, FileEntry]:
    """As `write_files`, from torch's write items.

    Args:
        items: parts of tensors, in the order of the file.
        make: returns the part of an item, in its shape and dtype.
        objects: other sharded values, by name.
    """
    torch.save(dict(common), folder / COMMON_FILE)
    save_config(BACKEND, str(folder))
    of_objects = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects]

    def resolve(item: WriteItem) -> Tensor | io.BytesIO:
        return serialized(objects[item.index.fqn]) if item.type == WriteItemType.BYTE_IO else make(item)

    writer = HashingWriter(folder, num_files=1)  # so that memory holds few tensors
    plans, metadata = create_default_global_save_plan([SavePlan([*items, *of_objects])])
    (plan,) = writer.prepare_global_plan(plans)
    writer.prepare_write_data(plan, planner=None)
    writer.finish(metadata, [writer.write(resolve, common.get("step", IMPORT_STEP))])
    return writer.written


def serialized(value: Any) -> io.BytesIO:
    """Return a value as the bytes of a torch archive, in a list as megatron-core writes it."""
    stream = io.BytesIO()
    torch.save([value], stream)
    return stream


def build_write_items(sources: Mapping[str, LazyTensor], has_stacks: bool) -> list[WriteItem]:
    """Return torch's write items for the tensors, in their order."""
    locations = [tensor_location(name, source, has_stacks) for name, source in sources.items()]
    num_layers = Counter(location.key for location in locations)
    return [
        write_item(
            location.key,
            location.chunk,
            location.shape if location.layer is None else (num_layers[location.key], *location.shape),
            location.dtype,
        )
        for location in locations
    ]


def write_item(key: str, chunk: ChunkStorageMetadata, shape: Sequence[int], dtype: torch.dtype) -> WriteItem:
    """Return torch's write item for a part of a tensor of this shape."""
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def tensor_location(name: str, source: LazyTensor, has_stacks: bool) -> TensorLocation:
    """Return the location of a tensor. A layer's tensor is in the stack of all layers if there are stacks."""
    match = LAYER_PATTERN.search(name)
    if match is None or not has_stacks:
        return TensorLocation(name, None, source.shape, source.dtype)
    key = LAYER_PATTERN.sub(r"\g<1>layers.", name, count=1)
    return TensorLocation(key, int(match[2]), source.shape, source.dtype)


def make_tensor(source: LazyTensor, item: WriteItem) -> Tensor:
    """Make a tensor in the shape of its chunk.

    Raises:
        CheckpointError: shape or dtype is not the source's.
    """
    tensor = source.make()
    if (tuple(tensor.shape), tensor.dtype) != (source.shape, source.dtype):
        raise CheckpointError(
            f"{item.index.fqn} has {tuple(tensor.shape)} {tensor.dtype}, expected {source.shape} {source.dtype}"
        )
    return tensor.view(item.tensor_data.chunk.sizes)


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor in a checkpoint.

    Attributes:
        key: of the stored tensor.
        layer: index in dim 0 of a stack of layers; None if it is not stacked.
        shape: of this tensor, without the stack's dim.
    """

    key: str
    layer: Optional[int]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The part of the stored tensor under `key`."""
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        if self.layer is not None:
            offsets, sizes = [self.layer, *offsets], [1, *sizes]
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


class CheckpointTensors:
    """The tensors of a checkpoint, by name.

    Args:
        path: a checkpoint's own folder; verify it with its manifest first.

    Attributes:
        locations: by name.
        objects: names of the other sharded values.

    Raises:
        CheckpointError: the checkpoint cannot be read, or lists more than `MAX_TENSORS` tensors of layers.
    """

    def __init__(self, path: Path):
        self.path = path
        with load_errors(path, needs_common=False):
            self._reader = SafeReader(path)
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._storage = metadata.storage_data
        self._kinds = {
            key: kind for key, kind in metadata.state_dict_metadata.items() if isinstance(kind, TensorStorageMetadata)
        }
        num_names = sum(layer_count(key, kind) or 1 for key, kind in self._kinds.items())
        if num_names > MAX_TENSORS:
            raise CheckpointError(f"{path} lists {num_names:,} tensors of layers, more than {MAX_TENSORS:,}")
        self.locations = dict(chain.from_iterable(tensor_locations(key, kind) for key, kind in self._kinds.items()))
        self.objects = tuple(key for key in metadata.state_dict_metadata if key not in self._kinds)

    def load(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            CheckpointError: it cannot be read.
        """
        location = self.locations[name]
        return self._read(name, location.key, location.chunk, location.dtype).view(location.shape)

    def lazy(self, name: str) -> LazyTensor:
        """Return a tensor that is read when it is written."""
        location = self.locations[name]
        return LazyTensor(location.shape, location.dtype, partial(self.load, name))

    def load_range(self, name: str, first: int, last: int) -> Tensor:
        """Read elements `first` to `last` (exclusive) of a flat tensor. Shape: (last - first,).

        Raises:
            CheckpointError: it cannot be read.
        """
        location = self.locations[name]
        chunk = ChunkStorageMetadata(torch.Size([first]), torch.Size([last - first]))
        return self._read(name, location.key, chunk, location.dtype)

    def _read(self, name: str, key: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Tensor:
        items = create_read_items_for_chunk_list(key, self._kinds[key], [chunk])
        if sum(prod(item.lengths) for item in items) != prod(chunk.sizes):
            raise CheckpointError(f"{self.path} does not contain all of {name}")
        with load_errors(self.path, needs_common=False):
            tensor = torch.empty(chunk.sizes, dtype=dtype)  # of any size that the checkpoint says
            self._reader.read_data(LoadPlan(items), SingleTensorPlanner(tensor)).wait()
        return tensor

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the stored tensor, which may be a stack of all layers."""
        return tuple(self._kinds[self.locations[name].key].size)

    def read_rows(self, name: str, first: int, last: int) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Yield what is stored of rows `first` to `last` (exclusive) of dim 0 of a tensor, of which a scalar has one.

        Stored chunks of any layout may have any parts of them. Memory holds these parts only, one at a time.

        Yields:
            The place of a part in a tensor of shape (last - first, *shape[1:]), and the part.

        Raises:
            CheckpointError: it cannot be read, or not all of the rows are stored.
        """
        location = self.locations[name]
        is_stacked, missing = location.layer is not None, (last - first) * prod(location.shape[1:])
        with load_errors(self.path, needs_common=False):
            for chunk in self._kinds[location.key].chunks:
                offsets, sizes = tuple(chunk.offsets[is_stacked:]) or (0,), tuple(chunk.sizes[is_stacked:]) or (1,)
                layer = location.layer - chunk.offsets[0] if location.layer is not None else 0
                begin, end = max(first, offsets[0]), min(last, offsets[0] + sizes[0])
                if not (0 <= layer < (chunk.sizes[0] if is_stacked else 1)) or begin >= end or 0 in sizes:
                    continue
                row = prod(sizes[1:])
                # Rows follow each other in a chunk, so these are one range of its elements.
                start = (layer * sizes[0] + begin - offsets[0]) * row
                info = self._storage[MetadataIndex(location.key, chunk.offsets)]
                part = self._reader.read_elements(info, start, (end - begin) * row).view(end - begin, *sizes[1:])
                columns = (slice(at, at + size) for at, size in zip(offsets[1:], sizes[1:], strict=True))
                yield (slice(begin - first, end - first), *columns), part
                missing -= part.numel()
        if missing:
            raise CheckpointError(f"{self.path} does not contain all of {name}")

    def load_object(self, name: str) -> Any:
        """Read one of `objects`, without running code from the checkpoint.

        Raises:
            CheckpointError: it is absent or cannot be read.
        """
        with load_errors(self.path, needs_common=False), no_process_group():
            wanted: dict[str, Any] = {name: None}
            checkpoint.load(wanted, storage_reader=self._reader, planner=SafeLoadPlanner(), no_dist=True)
            (value,) = wanted[name]  # megatron-core writes each object as a list of one
        return value


@contextmanager
def no_process_group() -> Iterator[None]:
    """Hide torch's warning that a load takes place in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


class SingleTensorPlanner(DefaultLoadPlanner):
    """Load planner that reads into one given tensor."""

    def __init__(self, tensor: Tensor):
        super().__init__()
        self.tensor = tensor

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor to read into."""
        return self.tensor


def layer_count(key: str, kind: TensorStorageMetadata) -> Optional[int]:
    """Return the number of layers in a stack of all layers; None for another tensor."""
    return None if STACKED_LAYERS_PATTERN.search(key) is None else kind.size[0]


def tensor_locations(key: str, kind: TensorStorageMetadata) -> Iterator[tuple[str, TensorLocation]]:
    """Yield names and locations of the tensors that are stored under a key."""
    shape, dtype = tuple(kind.size), kind.properties.dtype
    num_layers = layer_count(key, kind)
    if num_layers is None:
        yield key, TensorLocation(key, None, shape, dtype)
        return
    for layer in range(num_layers):
        yield (
            STACKED_LAYERS_PATTERN.sub(rf"\g<1>layers.{layer}.", key, count=1),
            TensorLocation(key, layer, shape[1:], dtype),
        )


def load_matching(path: Path, pattern: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors whose names match a shell pattern.

    Raises:
        CheckpointError: nothing matches, or the checkpoint cannot be read.
    """
    tensors = CheckpointTensors(path)
    wanted = [
        name
        for name, location in tensors.locations.items()
        if fnmatchcase(name, pattern) or fnmatchcase(location.key, pattern)
    ]
    if not wanted:
        have = ", ".join(list(tensors.locations)[:MAX_LISTED_NAMES]) + (
            ", ..." if len(tensors.locations) > MAX_LISTED_NAMES else ""
        )
        raise CheckpointError(f"{path}: no tensor name matches {pattern!r}; the names are {have}")
    for name in wanted:
        yield name, tensors.load(name)
