"""The checkpoint that a stability suite continues: its model becomes flags, and runs that do not fit it are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megafp8.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from megafp8.launch.stability import PartRun


def checkpoint_problems(checkpoint: str, parts: Sequence[str]) -> list[str]:
    """A checkpoint that is not there, or that no part uses."""
    from megafp8.checkpoint.directory import find_checkpoint
    from megafp8.launch.stability import CONTINUATION

    if not checkpoint:
        return []
    if CONTINUATION not in parts:
        return [f"--checkpoint is for the part {CONTINUATION}: name it in --parts, or remove it"]
    if not Path(checkpoint).is_dir():
        return [f"--checkpoint {checkpoint}: no such folder"]
    if find_checkpoint(Path(checkpoint)) is None:
        return [f"--checkpoint {checkpoint}: has no complete checkpoint; give the folder of a run's --save"]
    return []


def read_flags(checkpoint: str) -> tuple[str, ...]:
    """The model, sequence length and tokenizer of a checkpoint, as flags. Its folder has a complete checkpoint.

    Raises:
        ConfigError: the checkpoint cannot be read, or no flags give its settings.
    """
    from megafp8.config.flags import to_argv
    from megafp8.config.schema import RunConfig
    from megafp8.config.settings import with_values

    _, values = read_settings(checkpoint)
    try:
        return tuple(to_argv(with_values(RunConfig(), values)))
    except ConfigError as error:
        raise ConfigError(f"--checkpoint {checkpoint}: {error}") from None


def read_settings(checkpoint: str) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint of a folder, and its model, sequence length and tokenizer by setting.

    Raises:
        ConfigError: the checkpoint cannot be read.
    """
    from megafp8.config.schema import CheckpointConfig
    from megafp8.training import checkpoint_settings

    try:
        found = checkpoint_settings.read_settings(CheckpointConfig(), [Path(checkpoint)])
    except CheckpointError as error:
        raise ConfigError(f"--checkpoint {checkpoint}: {error}") from None
    assert found is not None
    return found


def check_continuation(checkpoint: str, parts: Sequence[PartRun], has_prepared_data: bool) -> None:
    """Check that the runs of the part continuation have the model and the vocabulary of the checkpoint.

    Args:
        has_prepared_data: whether their data are the bytes that the suite prepares. The user answers for other data,
            whose tokenizer may be the same one by another name.

    Raises:
        ConfigError: with what differs.
    """
    from megafp8.launch.stability import CONTINUATION

    run = next((each.run for each in parts if each.part == CONTINUATION), None)
    if run is None:
        return
    path, values = read_settings(checkpoint)
    from megafp8.checkpoint import compatibility
    from megafp8.checkpoint.metadata import read_config
    from megafp8.config.schema import RunConfig
    from megafp8.config.settings import with_values

    saved = with_values(RunConfig(), values)
    before, now = saved.data.tokenizer_type, run.config.data.tokenizer_type
    if has_prepared_data and before != now:
        raise ConfigError(
            f"--checkpoint {checkpoint}: was trained with {before}, and the suite prepares data for {now}: give "
            f"--data-path and --tokenizer-type {before} after --"
        )
    try:
        compatibility.check_model(path, saved, run.config)
        if run.padded_vocab is not None:
            compatibility.check_vocabulary(path, read_config(path), run.config, run.padded_vocab)
    except CheckpointError as error:
        raise ConfigError(
            f"--checkpoint {checkpoint}: {error} (remove what gives another model or vocabulary after --, or leave "
            f"{CONTINUATION} out of --parts)"
        ) from None
