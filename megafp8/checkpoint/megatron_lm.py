"""Checkpoints of Megatron-LM's training script: how a run recognizes and refuses one, and its plain values.

The plain values are in `common.pt`; Megatron-LM of megatron-core 0.19 saves them as an object among the tensors. Both
are read with `weights_only` and megatron-core's list of classes, none of which runs code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from megafp8.checkpoint.directory import checkpoint_path, list_steps
from megafp8.checkpoint.manifest import MANIFEST
from megafp8.checkpoint.metadata import load_errors
from megafp8.checkpoint.serialization import COMMON_FILE, FORMAT_FILE
from megafp8.checkpoint.standalone import CheckpointTensors
from megafp8.errors import CheckpointError

RANK_FOLDERS = "mp_rank_*"
COMMON_OBJECT = "common_state/shard_0_1"


def refuse_megatron_folder(folder: Path) -> None:
    """Raise if the newest checkpoint of a folder is Megatron-LM's, with the command that converts it.

    Raises:
        CheckpointError: it is.
    """
    steps = list_steps(folder)
    path = checkpoint_path(folder, steps[-1]) if steps else folder
    if not steps or (path / MANIFEST).exists():
        return
    is_old = any(path.glob(RANK_FOLDERS))
    if not is_old and (path / FORMAT_FILE).exists():
        try:
            is_old = "args" in load_plain_values(path)
        except CheckpointError:
            return  # a damaged checkpoint, which is reported as such
    if is_old:
        raise CheckpointError(
            f"{path} is a checkpoint of Megatron-LM. Convert it first: megafp8 convert from-megatron {folder} OUT"
        )


def load_plain_values(path: Path) -> Any:
    """Read what is not sharded.

    Raises:
        CheckpointError: it is absent or cannot be read.
    """
    if (path / COMMON_FILE).exists():
        with load_errors(path):
            return dist_checkpointing.load_common_state_dict(str(path))
    tensors = CheckpointTensors(path)
    if COMMON_OBJECT not in tensors.objects:
        raise CheckpointError(f"{path} has no {COMMON_FILE}: the file is lost, or another program wrote the checkpoint")
    return tensors.load_object(COMMON_OBJECT)
