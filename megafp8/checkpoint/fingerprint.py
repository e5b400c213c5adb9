"""The fingerprint of a checkpoint: hashes of its content, without a model or process groups.

Files of equal checkpoints differ in times, paths and sharding, so each tensor is read completely and hashed by name,
dtype, shape and bits. Hashes of weights, optimizer and scales do not depend on the parallel layout; RNG states belong
to ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megafp8.checkpoint import local_scales, weight_ema
from megafp8.checkpoint.metadata import OPTIMIZER_PREFIX, is_extra_state, load_common_state, load_errors
from megafp8.checkpoint.serialization import SafeLoadPlanner, SafeReader
from megafp8.checkpoint.standalone import no_process_group

# Plain values that depend on how the run was started or sharded, or that training does not use.
NON_STATE_KEYS = ("config", "origin", "layout", "content_metadata", local_scales.KEY)
RNG_STATE_PREFIX, AVERAGE = "random_state", "average"
GROUP_BYTES = 2**26
"""Tensors that a fingerprint reads together: torch takes milliseconds for each read."""


def fingerprint(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each part of a checkpoint and of all of them.

    The parts are weights, optimizer, scales (quantizer state), random (RNG states) and progress (step, samples,
    schedule), and average (moving average of the weights) if there is one. Another part that is absent has the hash of
    no bytes.

    Raises:
        CheckpointError: it cannot be read.
    """
    digests = {name: hashlib.sha256() for name in ("weights", "optimizer", "scales", "random", "progress", AVERAGE)}
    for name, content in canonical_tensors(path):
        digests[fingerprint_part(name)].update(name.encode() + b"\0" + content)
    plain = {name: value for name, value in load_common_state(path).items() if name not in NON_STATE_KEYS}
    digests["optimizer"].update(canonical_text(plain.pop("optimizer", None)).encode())
    if weight_ema.KEY in plain:
        digests[AVERAGE].update(canonical_text(plain.pop(weight_ema.KEY)).encode())
    else:
        del digests[AVERAGE]
    digests["progress"].update(canonical_text(plain).encode())
    parts = {name: digest.hexdigest() for name, digest in digests.items()}
    return parts | {"all": hashlib.sha256(json.dumps(parts).encode()).hexdigest()}


def fingerprint_part(name: str) -> str:
    """Return the part that a key belongs to."""
    if name.startswith(OPTIMIZER_PREFIX):
        return AVERAGE if name.startswith(weight_ema.PREFIX) else "optimizer"
    if name.startswith(RNG_STATE_PREFIX):
        return "random"
    return "scales" if is_extra_state(name) else "weights"


def canonical_tensors(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and canonical bytes of every tensor and object, with few bytes more than one tensor in memory."""
    with load_errors(path), no_process_group():
        reader = SafeReader(path)
        for wanted in _groups(reader.read_metadata()):
            checkpoint.load(wanted, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=True)
            for name, value in wanted.items():
                yield name, canonical_text(value).encode()


def _groups(metadata: Metadata) -> Iterator[dict[str, Any]]:
    """What is read together: places for tensors and objects by name, in the order of their names."""
    group: dict[str, Any] = {}
    free_bytes = GROUP_BYTES
    for name, kind in sorted(metadata.state_dict_metadata.items()):
        is_tensor = isinstance(kind, TensorStorageMetadata)
        num_bytes = prod(kind.size) * kind.properties.dtype.itemsize if is_tensor else 0
        if group and num_bytes > free_bytes:
            yield group
            group, free_bytes = {}, GROUP_BYTES
        group[name] = torch.empty(kind.size, dtype=kind.properties.dtype) if is_tensor else None
        free_bytes -= num_bytes
    yield group


def canonical_text(value: Any) -> str:
    """Return a value as text that is equal for equal bits."""
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(bits).hexdigest()}"
    if isinstance(value, dict):
        return json.dumps({str(key): canonical_text(each) for key, each in value.items()}, sort_keys=True)
    if isinstance(value, (list, tuple)):
        return json.dumps([canonical_text(each) for each in value])
    return repr(value)
