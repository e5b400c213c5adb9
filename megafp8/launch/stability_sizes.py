"""Sizes of a stability suite: the flags that a size gives to all runs, and what is left of them beside other flags.

1, 2 and 4 ranks share the global batch. Every recipe accepts the widths, but for Quartet II at `tiny`: it needs
multiples of 128, and the figures of docs/stability.md are those of width 64.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

from megafp8.config import topology
from megafp8.config.schema import RunConfig
from megafp8.config.settings import all_settings
from megafp8.errors import ConfigError

MODEL_SETTINGS = tuple(setting.name for setting in all_settings() if setting.section == "model")
DROPOUT = ("model.attention_dropout", "model.hidden_dropout")
"""0 unless given, also beside a preset that has some: the control draws other masks than the baseline."""

COMMON = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --lr-decay-style cosine "
    "--lr-warmup-fraction 0.1 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --num-workers 0 "
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a suite is.

    Attributes:
        flags: of all runs.
        lr: learning rate of all runs but those of the sweep and of parts whose flags have another one. The minimum is a
            tenth.
        factors: of the sweep, multiples of `lr`; they include 1.
        sweep_seeds: seeds of the sweep, unless the suite gives them.
        corpus_bytes: text that is prepared where the flags name no data.
        part_flags: of the runs of a part, unless the user gives them.
    """

    flags: str
    lr: float
    factors: tuple[float, ...]
    sweep_seeds: int
    corpus_bytes: int
    part_flags: Mapping[str, str] = field(default_factory=dict)


SIZES = {
    "tiny": Size(
        flags="--num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 160 --seq-length 64 "
        "--max-position-embeddings 64 --micro-batch-size 16 --global-batch-size 16 --train-iters 120 "
        "--eval-interval 30 --eval-iters 20 --num-threads 1",
        lr=1e-3, factors=(1, 4, 16, 64, 256, 1024), sweep_seeds=3, corpus_bytes=2_000_000,
    ),
    "small": Size(
        flags="--num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 384 --seq-length 128 "
        "--max-position-embeddings 128 --micro-batch-size 16 --global-batch-size 16 --train-iters 800 "
        "--eval-interval 100 --eval-iters 64 --num-threads 1",
        lr=2.3e-3, factors=(1, 2, 4, 8, 16, 32, 64, 128), sweep_seeds=3, corpus_bytes=10_000_000,
    ),
    "gpu-hour": Size(
        flags="--num-layers 8 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1408 --seq-length 1024 "
        "--max-position-embeddings 1024 --micro-batch-size 32 --global-batch-size 64 --train-iters 400 "
        "--eval-interval 50 --eval-iters 8",
        # The largest stable rate of BF16 was 4.8e-3, eight times this one: the sweep has three more doublings.
        lr=6e-4, factors=(1, 2, 4, 8, 16, 32, 64), sweep_seeds=2, corpus_bytes=100_000_000,
        # A step of the emulated runs takes four times as long as one of BF16. Their batch is a quarter, and their rate
        # is lower, too.
        part_flags={
            "controls": "--train-iters 150 --micro-batch-size 16 --global-batch-size 16 --lr 4e-4 --min-lr 4e-5"
        },
    ),
}  # fmt: skip


def size_flags(size: str, replaced: Collection[str]) -> tuple[str, ...]:
    """The flags of all runs that a size gives, without those of settings that are replaced."""
    return without_settings(f"{COMMON} {SIZES[size].flags}".split(), replaced)


def part_flags(size: str, part: str, given: Collection[str]) -> tuple[str, ...]:
    """The flags of the runs of a part that a size gives, without those of settings that the user gave.

    The minimum of the learning rate goes with a learning rate that was given: it was a tenth of another one.
    """
    flags = SIZES[size].part_flags.get(part, "").split()
    return without_settings(flags, {*given, "optimizer.min_lr"} if "optimizer.lr" in given else given)


def without_settings(flags: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    """Flags, each with its values, without those of the named settings."""
    setting_of = {flag: setting.name for setting in all_settings() for flag in (*setting.flags, *setting.off)}
    remaining: list[str] = []
    is_selected = True
    for word in flags:
        if word.startswith("--"):
            is_selected = setting_of[word] not in names
        if is_selected:
            remaining.append(word)
    return tuple(remaining)


def shared_micro_batch_size(config: RunConfig, given: Collection[str], world_size: int) -> Optional[int]:
    """A smaller micro-batch size, if that of the size does not divide the sequences of a rank; else None.

    Args:
        config: settings of all runs.
        given: names of the settings that the user gave. A given micro-batch size is kept.
        world_size: ranks of a run.
    """
    batch, micro = config.training.global_batch_size, config.training.micro_batch_size
    if "training.micro_batch_size" in given or not batch or not micro:
        return None
    replicas = data_parallel_ranks(config, world_size)
    if replicas is None or batch % replicas:
        return None
    shared = math.gcd(micro, batch // replicas)
    return None if shared == micro else shared


def data_parallel_ranks(config: RunConfig, world_size: int) -> Optional[int]:
    """The data-parallel ranks of a run; None for a layout that the rules of a run refuse."""
    try:
        return topology.data_parallel_size(config, world_size)
    except ConfigError:
        return None
