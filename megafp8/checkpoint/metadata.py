"""Metadata of a checkpoint, read without its tensors: configuration, plain values, names and shapes."""

from __future__ import annotations

import pickle
import platform
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.safe_globals import register_safe_globals
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megafp8.checkpoint.manifest import FOLDER_NAME, MANIFEST, Manifest, build_manifest, write_manifest
from megafp8.checkpoint.progress import FORMER_FIELDS, SkipHistory
from megafp8.checkpoint.serialization import COMMON_FILE, SafeLoadStrategy, SafeReader, check_before_reading
from megafp8.checkpoint.state_dict import EMBEDDING
from megafp8.config import settings
from megafp8.config.schema import RunConfig
from megafp8.data.sample_hash import SampleHash
from megafp8.device.collective_errors import error_text, raise_no_memory, raise_peer_lost
from megafp8.errors import CheckpointError, PeerLost
from megafp8.utils.plain_data import from_plain

OPTIMIZER_PREFIX = "optimizer."
# Substrings of keys of extra layer state (scales, amax histories): Transformer Engine's and the emulated layers'.
EXTRA_STATE_MARKERS = ("_extra_state", ".quantizer_state.")
# Raised by megatron-core and torch for files that are missing, truncated or of another model.
LOAD_EXCEPTIONS = (
    CheckpointingException, CheckpointException, OSError, RuntimeError, AttributeError, EOFError, KeyError,
    pickle.UnpicklingError, TypeError, ValueError, IndexError, ImportError, zipfile.BadZipFile, RecursionError,
)  # fmt: skip

# Types of plain values that some checkpoints lack.
PLAIN_FORMS: dict[str, Any] = {
    "schedule": dict, "grad_factor": (int, float), "origin": (str, NoneType), "local_scales": (list, tuple, NoneType),
    "gradient_residual_places": (dict, NoneType),
}  # fmt: skip

# A history of every version has them. Their defaults are those of a new run.
HISTORY_FIELDS = {"skipped", "num_in_row", "num_rollbacks", "window"}


def read_config(path: Path) -> RunConfig:
    """Return the configuration of the run that saved a checkpoint.

    Raises:
        CheckpointError: it is not a checkpoint of megafp8.
    """
    return settings.from_json(load_common_state(path)["config"])


def load_common_state(path: Path) -> dict[str, Any]:
    """Load the plain values of a checkpoint.

    Raises:
        CheckpointError: it is not a checkpoint of megafp8, or a value does not have its form.
    """
    with load_errors(path):
        state = dist_checkpointing.load_common_state_dict(str(path))
        if "config" not in state:
            raise CheckpointError(f"{path} is a megatron-core checkpoint without megafp8's configuration")
        check_form(state)
    return state


def check_form(common: dict[str, Any]) -> None:
    """Make what is made of the plain values later, so that values of another form are found when they are read."""
    settings.from_json(common["config"])
    skip_history(common)
    extension_states(common)
    if common.get("samples") is not None:
        from_plain(SampleHash, common["samples"], "samples")
    counts = (common["step"], common["consumed_samples"], *common["layout"])
    if any(type(count) is not int or count < 0 for count in counts):
        raise ValueError(f"step, samples and layout are {counts}, not numbers of 0 or more")
    for name, form in PLAIN_FORMS.items():
        if name in common and not isinstance(common[name], form):
            raise ValueError(f"{name} is {common[name]!r}")
    sizes = common.get("local_scales")
    if sizes is not None and not (len(sizes) == 2 and all(type(size) is int for size in sizes)):
        raise ValueError(f"local_scales is {sizes}, not two numbers of ranks")
    if "schedule" in common:
        check_schedule_form(common["schedule"])


def check_schedule_form(schedule: dict[str, Any]) -> None:
    """Raise ValueError if a schedule has no position, a style that is no text, or another value that is no number."""
    if schedule.get("num_steps") is None:
        raise ValueError("schedule has no num_steps")
    for name, value in schedule.items():
        if value is not None and not isinstance(value, str if str(name).endswith("_style") else (int, float)):
            raise ValueError(f"schedule has {name} = {value!r}")


def check_readable(path: Path) -> None:
    """Read back everything but tensors after a save.

    Another version of Python or torch may write a form that the safe loader refuses. The save then fails while the run
    still has its weights.

    Raises:
        CheckpointError: a load would refuse it.
    """
    register_safe_globals()
    try:
        SafeReader(path).read_metadata()
        torch.load(path / COMMON_FILE, map_location="cpu", weights_only=True)
    except LOAD_EXCEPTIONS as error:
        raise_no_memory(error)
        raise CheckpointError(
            f"it was written, but cannot be read with Python {platform.python_version()} and torch {torch.__version__} "
            f"(tested versions: constraints.txt): {error_text(error)}"
        ) from error


def skip_history(common: dict[str, Any]) -> SkipHistory:
    """Return the skip-update history in a checkpoint's plain values; empty for older checkpoints."""
    if "history" not in common:
        return SkipHistory()
    if missing := HISTORY_FIELDS - common["history"].keys():
        raise ValueError(f"history lacks {', '.join(sorted(missing))}")
    return from_plain(SkipHistory, common["history"], "history", ignores_unknown=True)


def extension_states(common: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the state of the training loop's extensions in a checkpoint's plain values, by name.

    Each extension checks its own values when it loads them.
    """
    states, history = common.get("extensions", {}), common.get("history", {})
    if not (isinstance(states, dict) and all(isinstance(state, dict) for state in states.values())):
        raise ValueError(f"extensions is {states!r}")
    of_guard = {name: history[name] for name in FORMER_FIELDS if history.get(name)}  # of an earlier version
    return {"LayerGuard": of_guard, **states} if of_guard else states


def embedding_rows(path: Path) -> int:
    """Return the number of embedding rows: the padded vocabulary size of the run that saved the checkpoint.

    megatron-core loads an embedding of another size without a warning, so callers compare it first.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    with load_errors(path):
        return dist_checkpointing.load_tensors_metadata(str(path), SafeLoadStrategy())[EMBEDDING].global_shape[0]


@contextmanager
def load_errors(path: Path, needs_common: bool = True) -> Iterator[None]:
    """Convert errors of a missing, damaged or foreign checkpoint to CheckpointError, after the safety checks.

    A lack of memory stays what it is.

    Args:
        needs_common: refuse a checkpoint without `common.pt`, which megatron-core must not be asked to load.
    """
    try:
        check_before_reading(path, needs_common)
        yield
    except (CheckpointError, PeerLost):
        raise
    except LOAD_EXCEPTIONS as error:
        raise_peer_lost(error)
        raise_no_memory(error)
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error_text(error)}") from error


def is_extra_state(key: str) -> bool:
    """Return whether a key belongs to a layer's state other than its weights."""
    return any(part in key for part in EXTRA_STATE_MARKERS)


@dataclass(frozen=True)
class TensorSummary:
    """Name, global shape, dtype, size and number of stored chunks of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    num_parts: int


@dataclass(frozen=True)
class CheckpointContents:
    """Contents of a checkpoint.

    Attributes:
        config: the run's settings as JSON text.
        samples: position in the sample order, if known.
        history: skipped updates.
        tensors: sorted by name.
        objects: names of non-tensor entries.
    """

    config: str
    samples: Any
    history: SkipHistory
    tensors: tuple[TensorSummary, ...]
    objects: tuple[str, ...]

    @property
    def num_parameters(self) -> int:
        """Number of elements of weights and buffers, without scales and amax histories."""
        return sum(
            prod(tensor.shape)
            for tensor in self.tensors
            if not (tensor.name.startswith(OPTIMIZER_PREFIX) or is_extra_state(tensor.name))
        )


def read_contents(path: Path) -> CheckpointContents:
    """Return names, shapes and settings of a checkpoint, without reading tensors.

    Raises:
        CheckpointError: it cannot be read.
    """
    common = load_common_state(path)
    with load_errors(path):
        entries = sorted(SafeReader(path).read_metadata().state_dict_metadata.items())
        tensors = []
        for name, entry in entries:
            if isinstance(entry, TensorStorageMetadata):
                shape, dtype = tuple(entry.size), str(entry.properties.dtype).removeprefix("torch.")
                num_bytes = prod(shape) * entry.properties.dtype.itemsize
                tensors.append(TensorSummary(name, shape, dtype, num_bytes, len(entry.chunks)))
    objects = tuple(name for name, entry in entries if not isinstance(entry, TensorStorageMetadata))
    return CheckpointContents(common["config"], common.get("samples"), skip_history(common), tuple(tensors), objects)


def seal(path: Path) -> Manifest:
    """Write a manifest for a checkpoint that was saved before manifests existed.

    Raises:
        CheckpointError: it has a manifest, or is not a checkpoint.
    """
    if (path / MANIFEST).exists():
        raise CheckpointError(f"{path} already has a manifest")
    match = FOLDER_NAME.fullmatch(path.resolve().name)
    if match is None:
        raise CheckpointError(f"{path} does not have the name of a checkpoint: iter_ and at least seven digits")
    read_contents(path)
    common = load_common_state(path)
    if common["step"] != int(match[1]):
        raise CheckpointError(f"{path} contains step {common['step']}")
    manifest = build_manifest(path, common["step"], common["consumed_samples"], tuple(common["layout"]))
    write_manifest(path, manifest)
    return manifest
