"""Built-in sizes of comparisons and stability suites: the flags that a size gives to all runs, beside other flags.

1, 2 and 4 ranks share the global batch. Every recipe accepts the widths, but for Quartet II at `tiny`: it needs
multiples of 128, and the figures of docs/stability.md are those of width 64.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

from megafp8.config import topology
from megafp8.config.flags import ParsedArgs
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
    """Model and length of built-in runs.

    Attributes:
        flags: of all runs.
        lr: learning rate of all runs but those of a sweep and of parts whose flags have another one. The minimum is a
            tenth.
        corpus_bytes: text that is prepared where the flags name no data.
    """

    flags: str
    lr: float
    corpus_bytes: int


@dataclass(frozen=True, kw_only=True)
class ComparisonSize(Size):
    """How large the runs of `megafp8 run-comparison` are.

    Attributes:
        seconds_per_step: of one run on one core or GPU, the mean of BF16, tensorwise scaling and NVFP4.
        startup_seconds: of one run, with its validations.
        run_bytes: on disk, of a finished run.
    """

    seconds_per_step: float
    startup_seconds: float
    run_bytes: int


@dataclass(frozen=True, kw_only=True)
class SuiteSize(Size):
    """How large a stability suite is.

    Attributes:
        factors: of the sweep, multiples of `lr`; they include 1.
        sweep_seeds: seeds of the sweep, unless the suite gives them.
        part_flags: of the runs of a part, unless the user gives them.
        fork_points: steps of a trunk at which known-bad controls fork.
        fork_length: their steps; None: an eighth of the run.
    """

    factors: tuple[float, ...]
    sweep_seeds: int
    part_flags: Mapping[str, str] = field(default_factory=dict)
    fork_points: int = 3
    fork_length: Optional[int] = None


COMPARISON_SIZES = {
    "laptop": ComparisonSize(
        flags="--num-layers 2 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 384 --seq-length 64 "
        "--max-position-embeddings 64 --micro-batch-size 16 --global-batch-size 16 --train-iters 300 "
        "--eval-interval 100 --eval-iters 32 --log-interval 10 --no-save-optim --no-save-rng",
        lr=2e-3, corpus_bytes=5_000_000, seconds_per_step=0.4, startup_seconds=25, run_bytes=2_000_000,
    ),
    "gpu": ComparisonSize(
        flags="--num-layers 8 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1408 --seq-length 1024 "
        "--max-position-embeddings 1024 --micro-batch-size 32 --global-batch-size 64 --train-iters 400 "
        "--eval-interval 100 --eval-iters 16 --log-interval 10 --no-save-optim --no-save-rng",
        lr=6e-4, corpus_bytes=100_000_000, seconds_per_step=0.1, startup_seconds=45, run_bytes=120_000_000,
    ),
}  # fmt: skip
"""A run that is interrupted starts again: nothing but its weights is saved."""


SIZES = {
    "tiny": SuiteSize(
        flags="--num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 160 --seq-length 64 "
        "--max-position-embeddings 64 --micro-batch-size 16 --global-batch-size 16 --train-iters 120 "
        "--eval-interval 30 --eval-iters 20 --num-threads 1",
        lr=1e-3, factors=(1, 4, 16, 64, 256, 1024), sweep_seeds=3, corpus_bytes=2_000_000,
        part_flags={"controls": "--train-iters 240"}, fork_length=60,
    ),
    "small": SuiteSize(
        flags="--num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 384 --seq-length 128 "
        "--max-position-embeddings 128 --micro-batch-size 16 --global-batch-size 16 --train-iters 800 "
        "--eval-interval 100 --eval-iters 64 --num-threads 1",
        lr=2.3e-3, factors=(1, 2, 4, 8, 16, 32, 64, 128), sweep_seeds=3, corpus_bytes=10_000_000,
    ),
    "gpu-hour": SuiteSize(
        flags="--num-layers 8 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1408 --seq-length 1024 "
        "--max-position-embeddings 1024 --micro-batch-size 32 --global-batch-size 64 --train-iters 400 "
        "--eval-interval 50 --eval-iters 8",
        # The largest stable rate of BF16 was 4.8e-3, eight times this one: the sweep has three more doublings.
        lr=6e-4, factors=(1, 2, 4, 8, 16, 32, 64), sweep_seeds=2, corpus_bytes=100_000_000,
        # A step of the emulated runs takes four times as long as one of BF16. Their batch is a quarter, and their rate
        # is lower, too.
        part_flags={
            "controls": "--train-iters 240 --micro-batch-size 16 --global-batch-size 16 --lr 4e-4 --min-lr 4e-5"
        },
        fork_points=1, fork_length=60,
    ),
}  # fmt: skip
WARMUP = "optimizer.lr_warmup_"


def size_flags(size: Size, replaced: Collection[str]) -> tuple[str, ...]:
    """The flags of all runs that a size gives, without those of settings that are replaced."""
    return without_settings(f"{COMMON} {size.flags}".split(), replaced)


def rate_flags(rate: float, given: Collection[str]) -> tuple[str, ...]:
    """Flags of a learning rate that decays to a tenth, or to the minimum that the user gave."""
    minimum = () if "optimizer.min_lr" in given else ("--min-lr", f"{rate / 10:.6g}")
    return ("--lr", f"{rate:.6g}", *minimum)


def names_model(parsed: ParsedArgs) -> bool:
    """Whether flags say the complete model: a preset, or a --config file with a width."""
    return "model.model_preset" in (parsed.given | parsed.from_file) or "model.hidden_size" in parsed.from_file


def comparison_flags(size: ComparisonSize, parsed: ParsedArgs) -> tuple[str, ...]:
    """The flags that a size gives to all runs of a comparison, beside flags that were given and replace its own."""
    given = parsed.given | parsed.from_file
    replaced = given | (set(MODEL_SETTINGS).difference(DROPOUT) if names_model(parsed) else set())
    if any(name.startswith(WARMUP) for name in given):  # in steps, samples or as a fraction: one excludes the others
        replaced |= {setting.name for setting in all_settings() if setting.name.startswith(WARMUP)}
    rate = size.lr if parsed.config.optimizer.lr is None else parsed.config.optimizer.lr
    rates = without_settings(rate_flags(rate, given), given)
    return (*size_flags(size, replaced), *rates)


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
