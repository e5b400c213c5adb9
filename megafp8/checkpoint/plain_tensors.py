"""Single tensors of a checkpoint, read without the model that they are of, in one process without groups.

Only the tensor at hand is in memory. megatron-core stacks what all layers have in one tensor, a layer an entry of
dim 0; here each layer's tensor has a name of its own, `decoder.layers.0.mlp.linear_fc1.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from math import prod
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megafp8.checkpoint.manifest import check_whole
from megafp8.checkpoint.reading import readable
from megafp8.checkpoint.safe_load import SafeReader
from megafp8.errors import CheckpointError

STACK = re.compile(r"(^|\.)layers\.(?!\d)")
SHOWN_NAMES = 12


@dataclass(frozen=True)
class Place:
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


def places_of(key: str, kind: TensorStorageMetadata) -> Iterator[tuple[str, Place]]:
    """The tensors under a key of a checkpoint, by name."""
    shape, dtype = tuple(kind.size), kind.properties.dtype
    if STACK.search(key) is None:
        yield key, Place(key, None, shape, dtype)
        return
    for layer in range(shape[0]):
        yield STACK.sub(rf"\g<1>layers.{layer}.", key, count=1), Place(key, layer, shape[1:], dtype)


def load_matching(path: Path, pattern: str) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors whose names match a shell pattern, one after the other.

    Raises:
        CheckpointError: nothing matches, or the checkpoint is damaged or cannot be read.
    """
    check_whole(path)
    tensors = PlainTensors(path)
    wanted = [
        name for name, place in tensors.places.items() if fnmatchcase(name, pattern) or fnmatchcase(place.key, pattern)
    ]
    if not wanted:
        have = ", ".join(list(tensors.places)[:SHOWN_NAMES]) + (", ..." if len(tensors.places) > SHOWN_NAMES else "")
        raise CheckpointError(f"{path}: no tensor's name matches {pattern!r}; they are {have}")
    for name in wanted:
        yield name, tensors.load(name)
