"""From a model and a cluster to a plan: the fastest layouts that fit, and how speed falls with the number of GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from megafp8.config import derived
from megafp8.config.flags import Invocation
from megafp8.config.rules.model import shape_is_given
from megafp8.config.schema import RunConfig
from megafp8.config.settings import settings_by_name, value_of, with_values
from megafp8.device.gpus import Gpu
from megafp8.errors import ConfigError
from megafp8.planning.layouts import (
    CONTEXT,
    MICRO,
    PIPELINE,
    TENSOR,
    Found,
    PlannedLayout,
    find_layouts,
    machine_problems,
)
from megafp8.planning.micro_batch import is_auto
from megafp8.planning.remarks import count_remarks, nearby_counts, ranking_remarks
from megafp8.planning.step_time import StepTime
from megafp8.recipes import registry

TOKENS_PER_STEP = 4 * 2**20
SCALING_COUNTS = tuple(2**exponent for exponent in range(3, 15))
MOST_LAYERS = 4096
"""Of a model; the search takes every divisor."""
LOSSES = (0.9, 0.75, 0.5)
"""Shares of the best speed a GPU whose crossing the scaling summary tells."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was found.

    Attributes:
        found: for the number of GPUs asked for.
        scaling: the fastest layout for each number of GPUs; None where nothing fits.
        assumed: settings that the command line left open, as they were filled.
        remarks: what the figures do not say of themselves.
    """

    gpu: Gpu
    found: Found
    scaling: dict[int, Optional[PlannedLayout]]
    assumed: dict[str, Any]
    remarks: list[str]


def make_plan(
    invocation: Invocation, gpu: Gpu, world_size: int, scaling_counts: Sequence[int] = SCALING_COUNTS
) -> Plan:
    """Plan a run.

    Args:
        invocation: training flags. Layout, micro batch and recompute are searched where they are not given.

    Raises:
        ConfigError: the flags break a rule under every layout, or the GPU does not have the recipe.
    """
    if shapeless := list(shape_is_given(invocation.config, world_size)):
        raise ConfigError(shapeless)  # alone: micro batch, positions and vocabulary come with most shapes
    assumed = assumptions(invocation, world_size)
    config = with_values(invocation.config, assumed)
    problems = machine_problems(config, gpu)
    if vocabulary_size(config) is None:
        problems.append("the vocabulary is the tokenizer's, which a plan does not read: give --vocab-size")
    if (config.model.num_layers or 0) > MOST_LAYERS:
        problems.append(f"--num-layers {config.model.num_layers:,}: a plan takes at most {MOST_LAYERS:,}")
    if problems:
        raise ConfigError(problems)

    def padded_vocab(candidate: RunConfig) -> int:
        return derived.padded_vocab_size(candidate, vocabulary_size(candidate) or 0)

    given = invocation.given - {MICRO} if is_auto(config) else invocation.given

    def search(num_gpus: int) -> Found:
        # A batch that was not given divides over these GPUs, not over those of another number.
        config = with_values(invocation.config, assumptions(invocation, num_gpus))
        return find_layouts(config, gpu, num_gpus, padded_vocab, given)

    found = search(world_size)
    if not found.num_legal:
        raise ConfigError(refusals(found, config, given))
    scaling = {}
    for count in scaling_counts:
        at_count = found if count == world_size else search(count)
        scaling[count] = at_count.layouts[0] if at_count.layouts else None
    nearby = {count: search(count) for count in nearby_counts(world_size)}
    remarks = [*count_remarks(found, nearby), *ranking_remarks(config, gpu, found)]
    return Plan(gpu=gpu, found=found, scaling=scaling, assumed=assumed, remarks=remarks)


def refusals(found: Found, config: RunConfig, given: Collection[str]) -> list[str]:
    """Why no layout is legal: what is wrong with the given settings, whatever the search chooses for the others."""
    flags = {name: settings_by_name()[name].flags[0] for name in (TENSOR, PIPELINE, CONTEXT, MICRO)}
    if found.nearest is None:
        sizes = [f"{flags[name]} {value_of(config, name)}" for name in (TENSOR, PIPELINE, CONTEXT) if name in given]
        return [
            f"{found.world_size:,} GPUs are no multiple of {' x '.join(sizes)}: give sizes whose product divides "
            "them, or another --gpus"
        ]
    if found.common_problems:
        return found.common_problems
    nearest, problems = found.nearest
    chosen = [f"{flag} {value_of(nearest, name)}" for name, flag in flags.items() if name not in given]
    head = f"none of {found.num_tried:,} layouts of {found.world_size:,} GPUs goes with what was given"
    return [f"{head}. The nearest, for which the search took {', '.join(chosen)}: {text}" for text in problems]


def vocabulary_size(config: RunConfig) -> Optional[int]:
    """Token ids before padding, without reading a tokenizer; NullTokenizer adds one."""
    if config.model.vocab_size is None:
        return None
    return config.model.vocab_size + (config.data.tokenizer_type == "NullTokenizer")


def assumptions(invocation: Invocation, world_size: int) -> dict[str, Any]:
    """Values for what the command line leaves open: settings that a fast run has, and what a run cannot be without."""
    config, given = invocation.config, invocation.given
    values: dict[str, Any] = {
        "precision.bf16": True,
        "precision.cross_entropy_loss_fusion": True,
        "precision.cross_entropy_fusion_impl": "te",
        "parallel.use_distributed_optimizer": True,
        "parallel.overlap_grad_reduce": True,
        "parallel.overlap_param_gather": True,
        "data.seq_length": config.model.max_position_embeddings,
        "optimizer.lr": 3e-4,
    }
    if "precision.fp8_recipe" in given and "precision.fp8_format" not in given:
        values["precision.fp8_format"] = registry.get(config.precision.fp8_recipe).default_format
    if config.training.train_samples is None:
        values["training.train_iters"] = 1000
    if not any((config.data.data_path, config.data.train_data_path, config.data.mock_data)):
        values |= {"data.mock_data": True, "data.tokenizer_type": "NullTokenizer"}
        if config.model.vocab_size is not None and "model.vocab_size" not in given:
            values["model.vocab_size"] = config.model.vocab_size - 1  # NullTokenizer adds one
    values = {name: value for name, value in values.items() if name not in given and _is_open(config, name, value)}
    seq = values.get("data.seq_length", config.data.seq_length)
    if config.training.global_batch_size is None and seq:
        values["training.global_batch_size"] = batch_for(world_size, TOKENS_PER_STEP // seq)
    return values


def batch_for(world_size: int, most: int) -> int:
    """A power of two times the odd factor of the GPUs, up to `most` sequences: divides over them, and over others."""
    odd = world_size // (world_size & -world_size)
    return odd * 2 ** max(0, (most // odd).bit_length() - 1)


def _is_open(config: RunConfig, name: str, value: Any) -> bool:
    """Whether a value of a file or preset does not stand already."""
    now = value_of(config, name)
    return now != value and (now in (None, False, "native") or name in ("data.tokenizer_type", "model.vocab_size"))


# ---- what limits scaling ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Limit:
    """At `world_size` GPUs a GPU reaches less than `share` of the best speed; `part` costs the most of it."""

    share: float
    world_size: int
    part: str


def scaling_limits(scaling: dict[int, Optional[PlannedLayout]]) -> list[Limit]:
    """The first number of GPUs behind the best one at which each share is lost, and the part that grew the most."""
    fits = {count: layout for count, layout in scaling.items() if layout is not None}
    if not fits:
        return []
    best_count = max(fits, key=lambda count: fits[count].step.tokens_per_s_per_gpu)
    best = fits[best_count].step
    limits = []
    for share in LOSSES:
        below = [
            count for count, layout in fits.items()
            if count > best_count and layout.step.tokens_per_s_per_gpu < share * best.tokens_per_s_per_gpu
        ]  # fmt: skip
        if below:
            count = min(below)
            limits.append(Limit(share=share, world_size=count, part=grown_part(best, fits[count].step)))
    return limits


def grown_part(before: StepTime, after: StepTime) -> str:
    """The part whose GPU seconds a token grew the most."""

    def cost(step: StepTime, name: str) -> float:
        return step.parts.get(name, 0.0) * step.num_gpus / step.tokens

    return max(after.parts, key=lambda name: cost(after, name) - cost(before, name))


def with_network(gpu: Gpu, gbit_per_s: Optional[float]) -> Gpu:
    """The GPU with another network adapter."""
    return gpu if gbit_per_s is None else dataclasses.replace(gpu, network_bytes_per_s=gbit_per_s * 1e9 / 8)
