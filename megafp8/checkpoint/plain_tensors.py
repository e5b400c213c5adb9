"""Single tensors of a megatron-core checkpoint, whole and on one rank, without building the model that they are of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from megafp8.checkpoint.load import readable
from megafp8.checkpoint.manifest import check_whole
from megafp8.checkpoint.safe_load import SafeStrategy
from megafp8.errors import CheckpointError

# megatron-core stacks what all layers have in one tensor, a layer an entry of dim 0.
STACKED = re.compile(r"(^|\.)layers\.(?!\d)")
SHOWN_NAMES = 12


def tensor_names(path: Path) -> dict[str, tuple[str, int | None]]:
    """The tensors of a checkpoint by name, with their key there and their entry of a stack.

    A layer's number is put into the name where the checkpoint has none: `decoder.layers.0.mlp.linear_fc1.weight`.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    names: dict[str, tuple[str, int | None]] = {}
    for key, tensor in _metadata(path).items():
        if STACKED.search(key) is None:
            names[key] = (key, None)
            continue
        for layer in range(tensor.global_shape[0]):
            names[STACKED.sub(rf"\g<1>layers.{layer}.", key, count=1)] = (key, layer)
    return names


def load_matching(path: Path, pattern: str) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors whose names match a shell pattern, one after the other; torch.distributed runs already.

    Raises:
        CheckpointError: nothing matches, or the checkpoint is damaged or cannot be read.
    """
    check_whole(path)
    names = tensor_names(path)
    by_key: dict[str, list[tuple[str, int | None]]] = {}
    for name, (key, layer) in names.items():
        if fnmatchcase(name, pattern) or fnmatchcase(key, pattern):
            by_key.setdefault(key, []).append((name, layer))
    if not by_key:
        have = ", ".join(list(names)[:SHOWN_NAMES]) + (", ..." if len(names) > SHOWN_NAMES else "")
        raise CheckpointError(f"{path}: no tensor's name matches {pattern!r}; they are {have}")
    for key, entries in by_key.items():
        whole = _load(path, key)
        for name, layer in entries:
            yield name, whole if layer is None else whole[layer]


def _load(path: Path, key: str) -> Tensor:
    """One tensor of a checkpoint."""
    wanted = {key: _metadata(path)[key]}
    with readable(path):
        return dist_checkpointing.load(wanted, str(path), SafeStrategy(), validate_access_integrity=False)[key]


def _metadata(path: Path) -> dict[str, ShardedTensor]:
    """All tensors of a checkpoint, without their data."""
    with readable(path):
        return dist_checkpointing.load_tensors_metadata(str(path), SafeStrategy())
