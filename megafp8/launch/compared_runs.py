"""Runs of a comparison before they start: what is wrong with them, and what earlier ones left in their folders."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from megafp8.config import flags, rules, settings, variants
from megafp8.config.rules.base import Rule
from megafp8.errors import ConfigError
from megafp8.launch.process_pool import PooledRun
from megafp8.resources.automatic import with_recorded
from megafp8.utils.files import UnreadableFile, read_text


def run_problems(
    words: Sequence[str], ranks: int, folder: Optional[Path], checked: tuple[Rule, ...] = rules.ALL_RULES
) -> list[str]:
    """Return what is wrong with the flags of one run, and with the run that its folder holds.

    Args:
        folder: None if what it holds need not have the same settings.
        checked: the rules that apply.
    """
    parsed, problems = flags.parse_with_problems(words)
    problems += rules.found_by(checked, parsed.config, ranks)
    if problems or folder is None or not (path := folder / "config.json").exists():
        return problems
    suggestion = "take another --output-dir, or remove it"
    try:
        before = settings.from_json(read_text(path))
    except (UnreadableFile, ConfigError) as error:
        return [f"{path} cannot be read: {error}: {suggestion}"]
    lines = variants.differences(before, with_recorded(parsed.config, before))
    return [f"{folder} holds a run with other settings ({'; '.join(lines)}): {suggestion}"] if lines else []


def visible_devices(num_gpus: int) -> list[str]:
    """Entries for CUDA_VISIBLE_DEVICES: those of this process, else all GPUs by number."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(num_gpus)]


def discard_partial_checkpoints(run: PooledRun) -> None:
    """Remove the checkpoints of an interrupted run that lack a part of its state: the run restarts."""
    from megafp8.checkpoint.directory import POINTER

    checkpoints = list(run.folder.glob("iter_*"))
    for checkpoint in checkpoints:
        shutil.rmtree(checkpoint)
    if checkpoints:
        (run.folder / POINTER).unlink(missing_ok=True)
        print(f"{run.name} restarts: what it saved lacks the state to resume (--no-save-optim)", file=sys.stderr)
