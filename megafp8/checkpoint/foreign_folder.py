"""Folders that hold something else than checkpoints of megafp8, such as a Hugging Face model.

A run that starts from such a folder would have random weights, so that it is refused with the command that helps.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from megafp8.checkpoint.directory import NON_PERSISTENT, POINTER, list_steps
from megafp8.checkpoint.manifest import FOLDER_NAME, MANIFEST
from megafp8.config.schema import CheckpointConfig
from megafp8.errors import CheckpointError
from megafp8.metrics.records import RECORDS_FILE
from megafp8.resilience.run_state import RUN_STATE_FILE
from megafp8.utils.files import UnreadableFile
from megafp8.utils.strict_json import read_json

HF_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
# Of other programs, beside files that a user may keep in the folder of a run.
OTHER_WEIGHTS = ("*.pt", "*.pth", "*.ckpt", "*.gguf", "*.distcp", "*.npz", "mp_rank_*", "global_step*", "release")
# What a run has before its first checkpoint, and what is left of its checkpoints.
RUN_CONTENT = (
    RECORDS_FILE, RUN_STATE_FILE, POINTER, NON_PERSISTENT, "iter_*", "tensorboard", "logs", "micro_batch_size.json",
)  # fmt: skip
MAX_LISTED_NAMES = 4


def refuse_foreign_folders(config: CheckpointConfig) -> None:
    """Raise if a folder to load from has no checkpoint, and is neither empty nor a run's.

    Raises:
        CheckpointError: with the command that makes a checkpoint of it.
    """
    is_own = (
        bool(config.save and config.load) and Path(config.save or "").resolve() == Path(config.load or "").resolve()
    )
    for flag, folder in (("--load", config.load), ("--pretrained-checkpoint", config.pretrained_checkpoint)):
        if folder and (reason := foreign_content(Path(folder), is_own=is_own and folder == config.load)):
            raise CheckpointError(f"{flag} {folder} {reason}")


def foreign_content(folder: Path, *, is_own: bool = False) -> str:
    """What a folder has in place of checkpoints, and what to do; empty for an empty folder and for a run's.

    Args:
        is_own: the run saves to it: files that are no weights may be there, such as a job's output.
    """
    if not folder.is_dir() or list_steps(folder):
        return ""
    if (folder / MANIFEST).is_file() and (step := FOLDER_NAME.fullmatch(folder.resolve().name)):
        return f"is one checkpoint: give {folder.parent} and --ckpt-step {int(step[1])}"
    if is_hugging_face_model(folder):
        command = shlex.join(["megafp8", "convert", "from-hf", str(folder), f"models/{folder.resolve().name}"])
        return f"is a Hugging Face model. Convert it: {command}"
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if any(path for pattern in OTHER_WEIGHTS for path in folder.glob(pattern)) or not (
        is_own or not names or any(path for pattern in RUN_CONTENT for path in folder.glob(pattern))
    ):
        more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
        return (
            f"has no checkpoint of megafp8, but {', '.join(names[:MAX_LISTED_NAMES])}{more}: give the folder that a "
            "run had as --save, or an empty one"
        )
    return ""


def is_hugging_face_model(folder: Path) -> bool:
    """Whether a folder has the weights of a Hugging Face model, or its config.json."""
    if any(path for pattern in HF_WEIGHTS for path in folder.glob(pattern)):
        return True
    try:
        fields = read_json(folder / "config.json")
    except UnreadableFile:
        return False
    # A run's config.json has sections of settings.
    return isinstance(fields, dict) and not {"model_type", "architectures"}.isdisjoint(fields)
