"""Folders with checkpoints of Megatron-LM's training script: which checkpoint, and its plain values.

The plain values (`checkpoint/megatron_lm.py` reads them) have Megatron-LM's arguments as an `argparse.Namespace`, with
members of a few enums of megatron-core and with dtypes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Optional

from megafp8.checkpoint.directory import POINTER, checkpoint_path, list_steps
from megafp8.checkpoint.manifest import MANIFEST
from megafp8.checkpoint.megatron_lm import RANK_FOLDERS, load_plain_values
from megafp8.checkpoint.serialization import COMMON_FILE, FORMAT_FILE
from megafp8.errors import CheckpointError
from megafp8.utils.files import LIST_BYTES, UnreadableFile, read_text

CONSUMED_SAMPLES = "consumed_train_samples"
PARALLEL_SIZES = (
    "pipeline_model_parallel_size", "tensor_model_parallel_size", "data_parallel_size", "context_parallel_size"
)  # fmt: skip
MAX_RANKS = 1 << 17


@dataclass(frozen=True)
class MegatronCheckpoint:
    """A checkpoint of Megatron-LM.

    Attributes:
        args: its arguments by name.
        common: its plain values, with `args`.
    """

    path: Path
    step: int
    args: Mapping[str, Any]
    common: Mapping[str, Any]

    def argument(self, name: str, default: int) -> int:
        """Return an argument that is a size; 1 or more.

        Raises:
            CheckpointError: it is something else.
        """
        value = default if self.args.get(name) is None else self.args[name]
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{self.path}: the argument {name} is {value!r}, not a positive integer")
        return value

    @property
    def consumed_samples(self) -> Optional[int]:
        """Number of samples that the run had read; None if the checkpoint does not say it.

        Raises:
            CheckpointError: it is no such number.
        """
        if CONSUMED_SAMPLES not in self.args:
            return None
        value = self.args[CONSUMED_SAMPLES]
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise CheckpointError(
                f"{self.path}: the argument {CONSUMED_SAMPLES} is {value!r}, and has to be a number of samples, 0 or "
                "more: without it a run does not know where in the data to continue"
            )
        return value

    @property
    def layout(self) -> tuple[int, int, int]:
        """Sizes of the parallel axes: pipeline, tensor, data x context.

        Raises:
            CheckpointError: they are no sizes, or those of more than `MAX_RANKS` ranks.
        """
        sizes = {name: self.argument(name, 1) for name in PARALLEL_SIZES}
        if prod(sizes.values()) > MAX_RANKS:
            given = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise CheckpointError(f"{self.path}: the arguments are of more than {MAX_RANKS:,} ranks: {given}")
        pipeline, tensor, data, context = sizes.values()
        return pipeline, tensor, data * context


def open_megatron_checkpoint(folder: Path, step: Optional[int] = None) -> MegatronCheckpoint:
    """Read the plain values of a checkpoint.

    Args:
        folder: of a run, or of one checkpoint.
        step: of the checkpoint; None is the one in `latest_checkpointed_iteration.txt`.

    Raises:
        CheckpointError: it is not a sharded checkpoint of Megatron-LM, or cannot be read.
    """
    path = find_megatron_checkpoint(folder, step)
    if any(path.glob(RANK_FOLDERS)):
        raise CheckpointError(
            f"{path} has Megatron-LM's old format (--ckpt-format torch), with a file for each rank. Megatron-LM "
            "converts it: start its script with --load of this folder, --ckpt-convert-format torch_dist and "
            "--ckpt-convert-save FOLDER"
        )
    if (path / MANIFEST).exists():
        raise CheckpointError(f"{path} is a checkpoint of megafp8, which needs no conversion")
    if not (path / FORMAT_FILE).exists():
        raise CheckpointError(f"{path} has no {FORMAT_FILE}: it is not a checkpoint of --ckpt-format torch_dist")
    common = load_plain_values(path)
    if not isinstance(common, dict):
        raise CheckpointError(f"{path / COMMON_FILE} holds a {type(common).__name__} instead of named values")
    args, iteration = common.get("args"), common.get("iteration")
    if not isinstance(args, Namespace) or type(iteration) is not int or not 0 <= iteration < 1 << 63:
        raise CheckpointError(
            f"{path / COMMON_FILE} has no arguments and iteration of Megatron-LM's training script: another program "
            "wrote it"
        )
    return MegatronCheckpoint(path, iteration, vars(args), common)


def find_megatron_checkpoint(folder: Path, step: Optional[int]) -> Path:
    """Return the folder of a checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    if any((folder / name).exists() for name in (COMMON_FILE, FORMAT_FILE)) or any(folder.glob(RANK_FOLDERS)):
        if step is not None:
            raise CheckpointError(f"--ckpt-step {step}: {folder} is a single checkpoint")
        return folder
    steps = list_steps(folder)
    if step is None:
        try:
            word = read_text(folder / POINTER, LIST_BYTES).strip()
        except UnreadableFile as error:
            if steps or not error.is_missing:
                raise CheckpointError(
                    f"{folder / POINTER} cannot be read ({error.reason}): give --ckpt-step N"
                ) from error
            raise CheckpointError(f"{folder} has no checkpoint of Megatron-LM") from error
        if not (word.isascii() and word.isdigit()):
            raise CheckpointError(f"{folder / POINTER} names no iteration but {word[:40]!r}: give --ckpt-step N")
        step = int(word)
    if step not in steps:
        have = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"{folder} has no checkpoint of iteration {step}; it has: {have}")
    return checkpoint_path(folder, step)
