"""What a checkpoint says of itself, read without its tensors."""

from __future__ import annotations

import pickle
import platform
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.safe_globals import register_safe_globals
from torch.distributed.checkpoint import CheckpointException

from megafp8.checkpoint.safe_load import COMMON, SafeReader, SafeStrategy, check_before_reading
from megafp8.checkpoint.skipped import History
from megafp8.checkpoint.together import raise_peer_lost, reason
from megafp8.checkpoint.vocabulary import EMBEDDING
from megafp8.config import serialize
from megafp8.config.schema import RunConfig
from megafp8.errors import CheckpointError, PeerLost

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
    return serialize.from_json(common_state(path)["config"])


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
