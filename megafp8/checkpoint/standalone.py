"""A checkpoint of weights alone, written without the model that they are of, in one process without groups.

Each tensor is made when its turn comes, so that no more than those being written are in memory. Names are those of
`plain_tensors`.

Single tensors of a checkpoint, read without the model that they are of, in one process without groups.

Only the tensor at hand is in memory. megatron-core stacks what all layers have in one tensor, a layer an entry of
dim 0; here each layer's tensor has a name of its own, `decoder.layers.0.mlp.linear_fc1.weight`.

What a checkpoint holds, in a few hashes: two runs that did the same have the same, however their files are cut.

Files of equal checkpoints differ: in times, in paths, in how tensors are divided among ranks. Here each tensor is read
whole, one after the other, and hashed by name, type, shape and bits. Hashes of weights, optimizer and scales are the
same for every layout; random states belong to ranks.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
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
from megafp8.checkpoint.compatibility import is_of_layers
from megafp8.checkpoint.manifest import FileEntry, Manifest, check_complete, relative_files
from megafp8.checkpoint.metadata import OPTIMIZER_PREFIX, check_readable, common_state, readable
from megafp8.checkpoint.save import BACKEND, sync_and_hash
from megafp8.checkpoint.serialization import COMMON, SafePlanner, SafeReader
from megafp8.checkpoint.state_dict import content_metadata
from megafp8.checkpoint.writer import HashingWriter
from megafp8.config.schema import RunConfig
from megafp8.config.settings import to_json
from megafp8.errors import CheckpointError
from megafp8.utils.formatting import utc_now

LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
STEP = 0
ONE_RANK = (1, 1, 1)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is made when it is written, by a thread of the writer.

    Attributes:
        make: gives it, of this shape and type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.dtype.itemsize


def save_weights(folder: Path, config: RunConfig, sources: Mapping[str, LazyTensor]) -> Path:
    """Write a checkpoint of step 0 that holds weights alone: what `--no-save-optim --no-save-rng` would leave.

    Args:
        sources: every weight of the model, by name.

    Returns:
        The finished checkpoint's folder.

    Raises:
        CheckpointError: it cannot be written or read back, or a tensor is not what its source says.
    """
    place = directory.unfinished_path(folder, STEP)
    common = {
        "step": STEP, "consumed_samples": 0, "samples": None, "config": to_json(config), "layout": list(ONE_RANK),
        "content_metadata": content_metadata(),
    }  # fmt: skip
    try:
        directory.make_unfinished(folder, STEP, sum(source.num_bytes for source in sources.values()))
        torch.save(common, place / COMMON)
        save_config(BACKEND, str(place))
        files = write_shards(place, sources)
        check_readable(place)
        files |= {name: sync_and_hash(place / name) for name in relative_files(place) if name not in files}
        manifest = Manifest(step=STEP, consumed_samples=0, layout=ONE_RANK, saved_at=utc_now(), files=files)
        return directory.finish(folder, STEP, manifest)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def write_shards(place: Path, sources: Mapping[str, LazyTensor]) -> dict[str, FileEntry]:
    """Write the tensors and the metadata that tells where they are; the tensors' files."""
    items = write_items(sources)
    of_index = {item.index: source for item, source in zip(items, sources.values(), strict=True)}
    writer = HashingWriter(place)
    plans, metadata = create_default_global_save_plan([SavePlan(items)])
    (plan,) = writer.prepare_global_plan(plans)
    writer.prepare_write_data(plan, planner=None)
    results = writer.write(lambda item: made(of_index[item.index], item), STEP)
    writer.finish(metadata, [results])
    return writer.written


def write_items(sources: Mapping[str, LazyTensor]) -> list[WriteItem]:
    """What torch has to know of each tensor, in their order."""
    places = [place_of(name, source) for name, source in sources.items()]
    lengths = Counter(place.key for place in places)
    items = []
    for place in places:
        whole = place.shape if place.layer is None else (lengths[place.key], *place.shape)
        data = TensorWriteData(place.chunk, TensorProperties(dtype=place.dtype), torch.Size(whole))
        items.append(WriteItem(MetadataIndex(place.key, place.chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return items


def place_of(name: str, source: LazyTensor) -> TensorLocation:
    """Where a tensor of this name lies: that of a layer in the stack of all layers."""
    match = LAYER.search(name)
    key = LAYER.sub(r"\g<1>layers.", name, count=1)
    return TensorLocation(key, None if match is None else int(match[2]), source.shape, source.dtype)


def made(source: LazyTensor, item: WriteItem) -> Tensor:
    """A tensor as it lies in the checkpoint.

    Raises:
        CheckpointError: it is not what its source says.
    """
    tensor = source.make()
    if (tuple(tensor.shape), tensor.dtype) != (source.shape, source.dtype):
        raise CheckpointError(
            f"{item.index.fqn} was made as {tuple(tensor.shape)} {tensor.dtype}, not as {source.shape} {source.dtype}"
        )
    return tensor.view(item.tensor_data.chunk.sizes)


STACK = re.compile(r"(^|\.)layers\.(?!\d)")
SHOWN_NAMES = 12


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor lies in a checkpoint.

    Attributes:
        key: its name there.
        layer: its entry of a stack; None if it is no part of one.
        shape: of the tensor itself.
    """

    key: str
    layer: Optional[int]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The part of the whole tensor under `key`."""
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        if self.layer is not None:
            offsets, sizes = [self.layer, *offsets], [1, *sizes]
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


class PlainTensors:
    """The tensors of a checkpoint.

    Args:
        path: a checkpoint's own folder; compare it with its manifest first.

    Attributes:
        places: by name.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        with readable(path):
            self._reader = SafeReader(path)
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._kinds = {
            key: kind for key, kind in metadata.state_dict_metadata.items() if isinstance(kind, TensorStorageMetadata)
        }
        self.places = dict(chain.from_iterable(places_of(key, kind) for key, kind in self._kinds.items()))

    def load(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            CheckpointError: it cannot be read.
        """
        place = self.places[name]
        tensor = torch.empty(place.chunk.sizes, dtype=place.dtype)
        items = create_read_items_for_chunk_list(place.key, self._kinds[place.key], [place.chunk])
        if sum(prod(item.lengths) for item in items) != tensor.numel():
            raise CheckpointError(f"{self.path} does not hold all of {name}")
        with readable(self.path):
            self._reader.read_data(LoadPlan(items), PartPlanner(tensor)).wait()
        return tensor.view(place.shape)


class PartPlanner(DefaultLoadPlanner):
    """torch's, for one part of one tensor.

    Args:
        tensor: what to read into.
    """

    def __init__(self, tensor: Tensor):
        super().__init__()
        self.tensor = tensor

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """What to read into."""
        return self.tensor


def places_of(key: str, kind: TensorStorageMetadata) -> Iterator[tuple[str, TensorLocation]]:
    """The tensors under a key of a checkpoint, by name."""
    shape, dtype = tuple(kind.size), kind.properties.dtype
    if STACK.search(key) is None:
        yield key, TensorLocation(key, None, shape, dtype)
        return
    for layer in range(shape[0]):
        yield STACK.sub(rf"\g<1>layers.{layer}.", key, count=1), TensorLocation(key, layer, shape[1:], dtype)


def load_matching(path: Path, pattern: str) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors whose names match a shell pattern, one after the other.

    Raises:
        CheckpointError: nothing matches, or the checkpoint is damaged or cannot be read.
    """
    check_complete(path)
    tensors = PlainTensors(path)
    wanted = [
        name for name, place in tensors.places.items() if fnmatchcase(name, pattern) or fnmatchcase(place.key, pattern)
    ]
    if not wanted:
        have = ", ".join(list(tensors.places)[:SHOWN_NAMES]) + (", ..." if len(tensors.places) > SHOWN_NAMES else "")
        raise CheckpointError(f"{path}: no tensor's name matches {pattern!r}; they are {have}")
    for name in wanted:
        yield name, tensors.load(name)


# Of the plain values: what says how the run was started, or how it was divided.
NOT_STATE = ("config", "layout", "content_metadata")
RANDOM = "random_state"


def fingerprint(path: Path) -> dict[str, str]:
    """SHA-256 of each part of a checkpoint, and of all of them.

    The parts are weights, optimizer, scales (what recipes remember), random (states of generators) and progress (step,
    samples, schedule). One that is not there has the hash of nothing.

    Raises:
        CheckpointError: it cannot be read.
    """
    digests = {name: hashlib.sha256() for name in ("weights", "optimizer", "scales", "random", "progress")}
    for name, content in tensors_of(path):
        digests[part_of(name)].update(name.encode() + b"\0" + content)
    plain = {name: value for name, value in common_state(path).items() if name not in NOT_STATE}
    digests["optimizer"].update(described(plain.pop("optimizer", None)).encode())
    digests["progress"].update(described(plain).encode())
    parts = {name: digest.hexdigest() for name, digest in digests.items()}
    return parts | {"all": hashlib.sha256(json.dumps(parts).encode()).hexdigest()}


def part_of(name: str) -> str:
    """The part that a key of the checkpoint belongs to."""
    if name.startswith(OPTIMIZER_PREFIX):
        return "optimizer"
    if name.startswith(RANDOM):
        return "random"
    return "scales" if is_of_layers(name) else "weights"


def tensors_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and description of every tensor and object, one whole tensor in memory at a time."""
    with readable(path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # so it is, on purpose
        reader = SafeReader(path)
        for name, kind in sorted(reader.read_metadata().state_dict_metadata.items()):
            is_tensor = isinstance(kind, TensorStorageMetadata)
            wanted: dict[str, Any] = {name: torch.empty(kind.size, dtype=kind.properties.dtype) if is_tensor else None}
            checkpoint.load(wanted, storage_reader=reader, planner=SafePlanner(), no_dist=True)
            yield name, described(wanted[name]).encode()


def described(value: Any) -> str:
    """A value as text that is the same for the same bits."""
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(bits).hexdigest()}"
    if isinstance(value, dict):
        return json.dumps({str(key): described(each) for key, each in value.items()}, sort_keys=True)
    if isinstance(value, (list, tuple)):
        return json.dumps([described(each) for each in value])
    return repr(value)
