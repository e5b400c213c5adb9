"""Settings of the model and the tokenizer from the checkpoint that a run loads (`--use-checkpoint-args`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megafp8.config import flags
from megafp8.config.schema import CheckpointConfig, RunConfig
from megafp8.config.settings import all_settings, value_of

# Sections and settings that are read. The second group is read with --use-mp-args-from-checkpoint-args.
DATA_SETTINGS = ("seq_length", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern",
                 "tiktoken_num_special_tokens")  # fmt: skip
PARALLEL_SETTINGS = ("tensor_model_parallel_size", "pipeline_model_parallel_size",
                     "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")  # fmt: skip


def parse(argv: Sequence[str]) -> tuple[flags.Invocation, list[str]]:
    """Parse a command line as `flags.parse_with_problems`, and with --use-checkpoint-args read the checkpoint.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    invocation, problems = flags.parse_with_problems(argv)
    checkpoint = invocation.config.checkpoint
    folders = [folder for folder in (checkpoint.load, checkpoint.pretrained_checkpoint) if folder is not None]
    if not checkpoint.use_checkpoint_args or not folders:
        return invocation, problems
    found = read_settings(checkpoint, [Path(folder) for folder in folders])
    if found is None:
        notice = f"--use-checkpoint-args: {' and '.join(folders)} has no checkpoint, so the settings are the flags'"
        return dataclasses.replace(invocation, notices=(*invocation.notices, notice)), problems
    path, values = found
    invocation, problems = flags.parse_with_problems(argv, values)
    notice = f"settings of the model and the tokenizer are read from {path} unless flags give them"
    return dataclasses.replace(invocation, notices=(*invocation.notices, notice)), problems


def read_settings(checkpoint: CheckpointConfig, folders: Sequence[Path]) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint that is loaded and its settings by name; None if there is none."""
    from megafp8.mcore import cpu_patches

    cpu_patches.install()
    from megafp8.checkpoint.convert.megatron_folder import refuse_megatron_folder
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
    names = [setting.name for setting in all_settings() if setting.section == "model"]
    names += [f"data.{field}" for field in DATA_SETTINGS]
    names += [f"parallel.{field}" for field in PARALLEL_SETTINGS] if with_parallel else []
    return {name: value_of(saved, name) for name in names}
