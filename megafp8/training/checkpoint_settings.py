"""Settings of the model and the tokenizer from the checkpoint that a run loads (`--use-checkpoint-args`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megafp8.config import flags
from megafp8.config.schema import CheckpointConfig, RunConfig
from megafp8.config.schema.setting import Role
from megafp8.config.settings import all_settings, value_of
from megafp8.utils.object_store import is_url, url_of


def parse(argv: Sequence[str]) -> tuple[flags.ParsedArgs, list[str]]:
    """Parse a command line as `flags.parse_with_problems`, and with --use-checkpoint-args read the checkpoint.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    parsed, problems = _parse_flags(argv)
    checkpoint = parsed.config.checkpoint
    folders = [folder for folder in (checkpoint.load, checkpoint.pretrained_checkpoint) if folder is not None]
    if not checkpoint.use_checkpoint_args or not folders:
        return parsed, problems
    if any(map(url_of, folders)):
        from megafp8.training.uploads import download_checkpoints  # imports megatron-core, which takes seconds

        download_checkpoints(checkpoint)
    found = read_settings(checkpoint, [Path(folder) for folder in folders])
    if found is None:
        warning = f"--use-checkpoint-args: {' and '.join(folders)} has no checkpoint, so the settings are the flags'"
        return dataclasses.replace(parsed, warnings=(*parsed.warnings, warning)), problems
    path, values = found
    parsed, problems = _parse_flags(argv, values)
    warning = f"settings of the model and the tokenizer are read from {path} unless flags give them"
    return dataclasses.replace(parsed, warnings=(*parsed.warnings, warning)), problems


def _parse_flags(*arguments: Any) -> tuple[flags.ParsedArgs, list[str]]:
    """Parse a command line, with the places in the local cache for URLs of folders of checkpoints."""
    parsed, problems = flags.parse_with_problems(*arguments)
    checkpoint = parsed.config.checkpoint
    if not any(map(is_url, filter(None, (checkpoint.save, checkpoint.load, checkpoint.pretrained_checkpoint)))):
        return parsed, problems
    from megafp8.training.uploads import with_local_folders

    config = dataclasses.replace(parsed.config, checkpoint=with_local_folders(checkpoint))
    return dataclasses.replace(parsed, config=config), problems


def read_settings(checkpoint: CheckpointConfig, folders: Sequence[Path]) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint that is loaded and its settings by name; None if there is none."""
    from megafp8.mcore import cpu_patches

    cpu_patches.install()
    from megafp8.checkpoint.megatron_lm import refuse_megatron_folder
    from megafp8.checkpoint.metadata import read_config
    from megafp8.checkpoint.resume_point import choose_checkpoint

    for folder in folders:
        refuse_megatron_folder(folder)
        step = checkpoint.ckpt_step if str(folder) == checkpoint.load else None
        found = choose_checkpoint(folder, step=step, with_hashes=False)
        if found is not None:
            return found.path, chosen_settings(read_config(found.path), checkpoint.use_mp_args_from_checkpoint_args)
    return None


def chosen_settings(saved: RunConfig, with_parallel: bool) -> dict[str, Any]:
    """Return the settings that a run takes from a checkpoint, by name."""
    return {
        setting.name: value_of(saved, setting.name)
        for setting in all_settings()
        if setting.section == "model"
        or (setting.role & Role.CARRIED and (with_parallel or setting.section != "parallel"))
    }
