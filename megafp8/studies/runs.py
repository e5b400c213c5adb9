"""A study's runs: what each would do, under an id that stays when the grid grows.

The id is a hash of what decides a run: its settings that differ from the defaults, and its ranks. Where it writes and
what it logs is left out. So another axis, other names of options and other files around them lead to the same run, and
another learning rate never passes for one that is finished.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megafp8.config import derived, flags, rules, size
from megafp8.config.flags import Invocation
from megafp8.config.schema import RunConfig
from megafp8.config.settings import all_settings, value_of, with_values
from megafp8.config.variants import NEUTRAL_SETTINGS
from megafp8.errors import ConfigError
from megafp8.planning import plan
from megafp8.studies.study import Grid, Option, Study

ID_DIGITS = 8
# Where a run starts decides it, though they are settings of checkpoints.
DECISIVE = ("checkpoint.pretrained_checkpoint", "checkpoint.finetune")
BUDGETS = ("tokens", "tokens_per_parameter")
# Longer than any schedule: for rules that are asked before the length is known.
MANY_STEPS = 10**9
# Megatron's class of that name.
BYTE_LEVEL_VOCABULARY = 512


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One run.

    Attributes:
        label: the options that were chosen, for people.
        choice: name of the option on each axis.
        flags: of pretrain_gpt.py, whole.
        world_size: GPUs, or ranks on a CPU.
        folder: of its checkpoints and records.
    """

    id: str
    label: str
    choice: Mapping[str, str]
    flags: tuple[str, ...]
    config: RunConfig
    world_size: int
    folder: Path

    @property
    def tokens(self) -> int:
        """That it trains on."""
        config = self.config
        return derived.train_iters(config, self.world_size) * derived.tokens_per_step(config, self.world_size)

    @property
    def padded_vocab(self) -> Optional[int]:
        """Rows of the embedding; None where only the tokenizer's files tell."""
        known = vocabulary_size(self.config)
        return None if known is None else derived.padded_vocab_size(self.config, known)

    @property
    def parameters(self) -> Optional[int]:
        """All of them, embeddings included; None without the vocabulary."""
        rows = self.padded_vocab
        return None if rows is None else size.count_parameters(self.config.model, rows).total

    @property
    def flops(self) -> Optional[float]:
        """Model FLOPs of the whole run; None without the vocabulary."""
        rows, seq_length = self.padded_vocab, self.config.data.seq_length
        if rows is None or seq_length is None:
            return None
        return self.tokens * size.flops_per_token(self.config.model, rows, seq_length)

    @property
    def recipe(self) -> str:
        """`bf16`, or the FP8 or FP4 recipe of the linears; `fp32` or `fp16` where those were asked for."""
        return derived.quantization_recipe(self.config.precision) or derived.params_dtype(self.config.precision)


def expand(study: Study) -> list[StudyRun]:
    """All runs, in the order of the file: the last axis changes fastest. A run of two grids is one run.

    Raises:
        ConfigError: flags of a run are wrong (no run is meant to start then), or two options of a grid mean the same.
    """
    runs: dict[str, StudyRun] = {}
    problems: dict[str, list[str]] = {}
    for grid in study.grids:
        of_grid: dict[str, str] = {}
        for options in itertools.product(*grid.values()):
            run, found = build_run(study, grid, options)
            for problem in found:
                problems.setdefault(problem, []).append(run.label)
            if run.id in of_grid and not found:
                problems.setdefault(f"the same run as {of_grid[run.id]}", []).append(run.label)
            of_grid[run.id] = run.label
            runs.setdefault(run.id, run)
    if problems:
        raise ConfigError([f"{labels_text(labels)}: {problem}" for problem, labels in problems.items()])
    return list(runs.values())


def build_run(study: Study, grid: Grid, options: Sequence[Option]) -> tuple[StudyRun, list[str]]:
    """A run, and what is wrong with it. With problems, the run is good for its label only."""
    chosen = (study.common, *options)
    label = "-".join(safe(option.name) for option in options) or study.name
    gpus = last_size(chosen, ("gpus",)) or ("gpus", 1.0)
    budget = last_size(chosen, BUDGETS)
    words = [word for option in chosen for word in option.flags]
    invocation, problems = flags.read(words)
    config, world_size = invocation.config, int(gpus[1])
    problems += own_problems(invocation, gpus[1], budget)
    config = saved_in(config, study.folder / label)
    if budget is not None and not problems:
        # The rules first, at any length: arithmetic takes sound settings for granted.
        problems += rules.setting_problems(with_values(config, {"training.train_iters": MANY_STEPS}), world_size)
        if not problems:
            steps = budget_steps(config, world_size, *budget)
            words += ["--train-iters", str(steps)]
            config = with_values(config, {"training.train_iters": steps})
    if not problems:
        problems += rules.setting_problems(config, world_size)
    run_id = id_of(config, world_size)
    folder = folder_of(study.folder, run_id, label)
    run = StudyRun(
        id=run_id, label=label, choice={axis: option.name for axis, option in zip(grid, options, strict=True)},
        flags=(*words, "--save", str(folder), "--load", str(folder)), config=saved_in(config, folder),
        world_size=world_size, folder=folder,
    )  # fmt: skip
    return run, problems


def saved_in(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration of a run that saves there, and goes on from there."""
    return with_values(config, {"checkpoint.save": str(folder), "checkpoint.load": str(folder)})


def last_size(options: Sequence[Option], names: Sequence[str]) -> Optional[tuple[str, float]]:
    """The one of these sizes that is named last, and its value."""
    named = [(name, option.sizes[name]) for option in options for name in names if name in option.sizes]
    return named[-1] if named else None


def own_problems(invocation: Invocation, gpus: float, budget: Optional[tuple[str, float]]) -> list[str]:
    """What a study does not take, though a run would."""
    config, problems = invocation.config, []
    if invocation.dry_run or config.checkpoint.save or config.checkpoint.load:
        problems.append("--save, --load and --dry-run: each run has a folder of its own in the study's; remove them")
    if gpus % 1:
        problems.append(f"gpus: {gpus:g} is no whole number")
    if budget is None:
        return problems
    if config.training.train_iters is not None or config.training.train_samples is not None:
        problems.append(f"--train-iters and --train-samples follow from {budget[0]}: give one of both")
    if budget[0] == "tokens_per_parameter" and vocabulary_size(config) is None:
        problems.append("tokens_per_parameter: the vocabulary is the tokenizer's, which is not read: give --vocab-size")
    return problems


def budget_steps(config: RunConfig, world_size: int, kind: str, amount: float) -> int:
    """Steps for at least so many tokens, or tokens a parameter (all parameters, embeddings included)."""
    if kind == "tokens_per_parameter":
        rows = derived.padded_vocab_size(config, vocabulary_size(config) or 0)
        amount *= size.count_parameters(config.model, rows).total
    return math.ceil(amount / derived.tokens_per_step(config, world_size))


def vocabulary_size(config: RunConfig) -> Optional[int]:
    """Token ids before padding, as far as they are known without the tokenizer's files."""
    is_byte_level = config.model.vocab_size is None and config.data.tokenizer_type == "ByteLevelTokenizer"
    return BYTE_LEVEL_VOCABULARY if is_byte_level else plan.vocabulary_size(config)


def id_of(config: RunConfig, world_size: int) -> str:
    """The hash of what decides a run; a setting that a later version adds changes nothing at its default."""
    decisive = {
        setting.name: value_of(config, setting.name)
        for setting in all_settings()
        if value_of(config, setting.name) != setting.default
        and (setting.name in DECISIVE or not setting.name.startswith(NEUTRAL_SETTINGS))
    }
    canonical = json.dumps([world_size, decisive], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:ID_DIGITS]


def folder_of(study_folder: Path, run_id: str, label: str) -> Path:
    """Where a run is: the folder that ends with its id, or the one that it will have."""
    return next(iter(sorted(study_folder.glob(f"*-{run_id}"))), study_folder / f"{label}-{run_id}")


def safe(text: str) -> str:
    """A part of a file's name."""
    return re.sub(r"[^\w.+=-]+", "_", text)


def labels_text(labels: Sequence[str]) -> str:
    """Runs that share a problem."""
    return labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
