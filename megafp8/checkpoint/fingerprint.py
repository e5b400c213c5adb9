"""What a checkpoint holds, in a few hashes: two runs that did the same have the same, however their files are cut.

Files of equal checkpoints differ: in times, in paths, in how tensors are divided among ranks. Here each tensor is read
whole, one after the other, and hashed by name, type, shape and bits. Hashes of weights, optimizer and scales are the
same for every layout; random states belong to ranks.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megafp8.checkpoint.contents import OPTIMIZER_PREFIX
from megafp8.checkpoint.reading import common_state, readable
from megafp8.checkpoint.safe_load import SafePlanner, SafeReader
from megafp8.checkpoint.strictness import is_of_layers

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
