"""The planner: from a model and a cluster to the fastest layouts that fit, and how speed scales with GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from megafp8.config import derived, dimensions, iterations
from megafp8.config.expert_layers import is_mixture
from megafp8.config.flags import ParsedArgs
from megafp8.config.micro_batch_sizes import is_auto
from megafp8.config.rules.base import batch_schedule
from megafp8.config.rules.model import shape_is_given
from megafp8.config.schema import RunConfig
from megafp8.config.settings import settings_by_name, value_of, with_values
from megafp8.device.gpus import Gpu
from megafp8.errors import ConfigError
from megafp8.planning import layouts
from megafp8.planning.layouts import CONTEXT, PIPELINE, LayoutSearch, PlannedLayout
from megafp8.planning.mixture_time import expert_warnings
from megafp8.planning.planned_run import attention_lines, documents_of
from megafp8.planning.step_time import StepTime
from megafp8.recipes import registry
from megafp8.resources.savings import MICRO, TENSOR
from megafp8.utils.integers import round_up

# ---- Warnings on a plan: nearby numbers of GPUs that are much faster, and recipes that the plan cannot rank ---------

GPUS_PER_NODE, GPUS_PER_NODE_GROUP = 8, 64
NEARBY_FRACTION = 1 / 4
"""Other numbers of GPUs are searched within this fraction of the requested one."""
MIN_SPEEDUP = 1.1
"""Speedup per GPU from which another number of GPUs gets a warning."""
HOST_FRACTION = 0.05
"""Host-bound fraction of a step from which the ranking of recipes is not reliable."""


def nearby_counts(world_size: int) -> list[int]:
    """Nearby numbers of GPUs that divide better: full and half nodes, or full and half groups of nodes."""
    unit = GPUS_PER_NODE if world_size % GPUS_PER_NODE else GPUS_PER_NODE_GROUP
    counts = {
        count
        for size in (unit // 2, unit)
        for count in (world_size // size * size, round_up(world_size, size))
    }  # fmt: skip
    return sorted(
        count for count in counts - {0, world_size} if abs(count - world_size) <= NEARBY_FRACTION * world_size
    )


def gpu_count_warnings(search: LayoutSearch, nearby: Mapping[int, LayoutSearch]) -> Iterator[str]:
    """A warning if other numbers of GPUs are much faster per GPU than the requested one."""
    count, speed = search.world_size, _best_speed(search)
    speeds = {other: _best_speed(at) for other, at in nearby.items() if at.layouts}
    faster = {other: theirs for other, theirs in speeds.items() if theirs >= MIN_SPEEDUP * speed}
    if not faster:
        return
    alternatives = ", ".join(
        f"{other:,} GPUs give {other * theirs:,.0f}" + (f" ({theirs / speed - 1:+.0%} per GPU)" if speed else "")
        for other, theirs in faster.items()
    )
    text = f"{count:,} GPUs {factor_text(count)}: in total they give {count * speed:,.0f} tokens/s"
    is_fewer = any(other < count and other * theirs > count * speed for other, theirs in faster.items())
    yield f"{text}; {alternatives}" + (": more with fewer GPUs" if is_fewer else "")


def _best_speed(search: LayoutSearch) -> float:
    """Tokens/s per GPU of the fastest layout; 0 if none fits."""
    return search.layouts[0].step.tokens_per_s_per_gpu if search.layouts else 0.0


def factor_text(count: int) -> str:
    """Why few layouts are possible on this number of GPUs."""
    odd = count // (count & -count)
    factor = next((divisor for divisor in range(3, int(odd**0.5) + 1, 2) if odd % divisor == 0), odd)
    if factor == count:
        return f"are a prime number, which can only be divided as 1 x {count:,}"
    return f"have the odd factor {odd:,}, which few layouts can use"


def ranking_warnings(config: RunConfig, gpu: Gpu, search: LayoutSearch) -> Iterator[str]:
    """Warnings on recipes whose speed relative to others the plan does not know."""
    for recipe in derived.used_recipes(config.precision):
        if not recipe.native_capabilities:
            rate = "FP8" if recipe.multiplies_codes(gpu.compute_capability) else "BF16"
            yield (
                f"{recipe.name}: not supported by Transformer Engine, so layers are emulated; planned with GEMMs at "
                f"the speed of {rate}, and its casts were not measured in a complete step"
            )
    if gpu.compute_capability < (10, 0):
        return
    if is_mixture(config.model):
        yield (
            f"recipes of mixtures of experts are not ranked on {gpu.name}, because no measured or published speed of "
            "their grouped GEMMs is available"
        )
    unknown = [recipe.name for recipe in derived.used_recipes(config.precision) if not recipe.is_ranked_on_blackwell]
    if unknown:
        yield (
            f"{' and '.join(unknown)}: not ranked on {gpu.name}, because no measured or published speed is available: "
            "another recipe may be faster"
        )
    if not is_mixture(config.model):
        for recipe in derived.used_recipes(config.precision):
            if recipe.blackwell_note:
                yield f"{recipe.name}: {recipe.blackwell_note}"
    step = search.layouts[0].step if search.layouts else None
    host_fraction = step.parts.get("host", 0.0) / step.seconds if step else 0.0
    if host_fraction > HOST_FRACTION:
        yield (
            f"recipes are not ranked where layers wait for the host ({host_fraction:.0%} of layout 1's step): launch "
            f"times were measured on the host of an H200, not of a {gpu.name}"
        )


# ----------------------------------------------------------------------------------------------------------------------

TOKENS_PER_STEP = 4 * 2**20
SCALING_COUNTS = tuple(2**exponent for exponent in range(3, 15))
MIXTURE_LENGTH = 4096
"""Sequence length of the pretraining of Qwen3-30B-A3B, OLMoE and DeepSeek-V3; their positions were extended later."""
MAX_LAYERS = 4096
"""Limit on the number of layers, because the search tries every divisor of it."""
SPEED_FRACTIONS = (0.9, 0.75, 0.5)
"""Fractions of the best speed per GPU for which the scaling summary reports where they are lost."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of planning a run.

    Attributes:
        search: the layouts for the requested number of GPUs.
        scaling: the fastest layout for each number of GPUs; None if nothing fits.
        assumed: values that were filled in for settings that the command line does not give.
        warnings: caveats on the figures.
    """

    gpu: Gpu
    search: LayoutSearch
    scaling: dict[int, Optional[PlannedLayout]]
    assumed: dict[str, Any]
    warnings: list[str]


def make_plan(parsed: ParsedArgs, gpu: Gpu, world_size: int, scaling_counts: Sequence[int] = SCALING_COUNTS) -> Plan:
    """Plan a run.

    Args:
        parsed: training flags. Layout, micro batch size and recomputation are searched unless they are given.

    Raises:
        ConfigError: the flags violate a rule under every layout, or the GPU does not have the recipe.
    """
    if shape_problems := list(shape_is_given(parsed.config, world_size)):
        # Reported alone: a model shape usually sets the micro batch size, positions and vocabulary as well.
        raise ConfigError(shape_problems)
    assumed = assumptions(parsed, world_size)
    config = with_values(parsed.config, assumed)
    problems = layouts.machine_problems(config, gpu)
    if is_mixture(config.model) and config.precision.precision_map:
        problems.append("--precision with --num-experts: its step times are not predicted; remove --precision")
    if vocabulary_size(config) is None:
        problems.append("the vocabulary size is unknown, because a plan does not read the tokenizer: give --vocab-size")
    if (config.model.num_layers or 0) > MAX_LAYERS:
        problems.append(f"--num-layers {config.model.num_layers:,}: a plan supports at most {MAX_LAYERS:,}")
    if problems:
        raise ConfigError(problems)

    def padded_vocab(candidate: RunConfig) -> int:
        return dimensions.padded_vocab_size(candidate, vocabulary_size(candidate) or 0)

    given = parsed.given - {MICRO} if is_auto(config.training) else parsed.given
    documents = documents_of(config, world_size)

    def search(num_gpus: int) -> LayoutSearch:
        # A default global batch size depends on the number of GPUs, which it must be divisible by.
        config = with_values(parsed.config, assumptions(parsed, num_gpus))
        return layouts.find_layouts(config, gpu, num_gpus, padded_vocab, given, document_length=documents.length)

    requested = search(world_size)
    if not requested.num_legal:
        raise ConfigError(search_problems(requested, config, given))
    scaling = {}
    for count in scaling_counts:
        fitting = (requested if count == world_size else search(count)).layouts
        scaling[count] = fitting[0] if fitting else None
    # The search for a mixture takes several times as long: it has expert-parallel sizes as well.
    nearby = {} if is_mixture(config.model) else {count: search(count) for count in nearby_counts(world_size)}
    warnings = [*gpu_count_warnings(requested, nearby), *ranking_warnings(config, gpu, requested)]
    warnings += attention_lines(config, documents)
    if requested.layouts:
        warnings += expert_warnings(requested.layouts[0].run)
    return Plan(gpu=gpu, search=requested, scaling=scaling, assumed=assumed, warnings=warnings)


def default_scaling(config: RunConfig) -> tuple[int, ...]:
    """Numbers of GPUs for the scaling of a plan; none for a mixture, whose search takes several times as long."""
    return () if is_mixture(config.model) else SCALING_COUNTS


def search_problems(search: LayoutSearch, config: RunConfig, given: Collection[str]) -> list[str]:
    """Why no layout is legal."""
    flags = {name: settings_by_name()[name].flags[0] for name in (TENSOR, PIPELINE, CONTEXT, MICRO)}
    if search.nearest is None:
        sizes = [f"{flags[name]} {value_of(config, name)}" for name in (TENSOR, PIPELINE, CONTEXT) if name in given]
        return [
            f"{search.world_size:,} GPUs are not a multiple of {' x '.join(sizes)}: use sizes whose product divides "
            "the number of GPUs, or another --gpus"
        ]
    if search.common_problems:
        return search.common_problems
    nearest, problems = search.nearest
    chosen = [f"{flag} {value_of(nearest, name)}" for name, flag in flags.items() if name not in given]
    head = f"none of {search.num_tried:,} layouts of {search.world_size:,} GPUs is compatible with the given flags"
    return [f"{head}. The nearest layout, {', '.join(chosen)}: {text}" for text in problems]


def vocabulary_size(config: RunConfig) -> Optional[int]:
    """Vocabulary size before padding, without reading a tokenizer; None if only the tokenizer knows it."""
    if config.model.vocab_size is None:
        return None
    return config.model.vocab_size + (config.data.tokenizer_type == "NullTokenizer")  # which adds one token


def assumptions(parsed: ParsedArgs, world_size: int) -> dict[str, Any]:
    """Values for settings that a run requires and the command line does not give."""
    config, given = parsed.config, parsed.given
    values: dict[str, Any] = {
        "precision.bf16": True,
        "data.seq_length": assumed_length(config),
        "optimizer.lr": 3e-4,
    }
    if "precision.fp8_recipe" in given and "precision.fp8_format" not in given:
        values["precision.fp8_format"] = registry.get(config.precision.fp8_recipe).default_format
    has_schedule = iterations.has_batch_schedule(config.training)
    if config.training.train_samples is None and not has_schedule:
        values["training.train_iters"] = 1000
    if not any((config.data.data_path, config.data.train_data_path, config.data.data_phases, config.data.mock_data)):
        values |= {"data.mock_data": True, "data.tokenizer_type": "NullTokenizer"}
        if config.model.vocab_size is not None and "model.vocab_size" not in given:
            values["model.vocab_size"] = config.model.vocab_size - 1
    values = {name: value for name, value in values.items() if name not in given and _is_open(config, name, value)}
    seq = values.get("data.seq_length", config.data.seq_length)
    if config.training.global_batch_size is None and not config.training.step_batch_size_schedule and seq:
        values["training.global_batch_size"] = default_batch_size(world_size, TOKENS_PER_STEP // seq)
    schedule = batch_schedule(with_values(config, values), world_size) if has_schedule else None
    if schedule is not None and config.training.train_samples is None and config.training.train_iters is None:
        values["training.train_samples"] = schedule.advance(1000, schedule.phases[-1].start_sample)
    return values


def assumed_length(config: RunConfig) -> Optional[int]:
    """The sequence length of a run: all positions of a dense model, and of a mixture what most are trained with."""
    positions = config.model.max_position_embeddings
    is_long = is_mixture(config.model) and positions is not None and positions > MIXTURE_LENGTH
    return MIXTURE_LENGTH if is_long else positions


def default_batch_size(world_size: int, limit: int) -> int:
    """The largest power of two times the odd factor of `world_size`, up to `limit` sequences."""
    odd = world_size // (world_size & -world_size)
    return odd << max(0, (limit // odd).bit_length() - 1)


def _is_open(config: RunConfig, name: str, value: Any) -> bool:
    """Whether neither a file nor a preset sets the setting already."""
    current = value_of(config, name)
    if current == value:
        return False
    return current in (None, False, "native") or name in ("data.tokenizer_type", "model.vocab_size")


# ---- what limits scaling ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ScalingLimit:
    """From `world_size` GPUs on, speed per GPU is below `share` of the best; `part` grew the most."""

    share: float
    world_size: int
    part: str


def scaling_limits(scaling: dict[int, Optional[PlannedLayout]]) -> list[ScalingLimit]:
    """For each of `SPEED_FRACTIONS`, the first number of GPUs above the best one at which it is lost."""
    fits = {count: layout for count, layout in scaling.items() if layout is not None}
    if not fits:
        return []
    best_count = max(fits, key=lambda count: fits[count].step.tokens_per_s_per_gpu)
    best = fits[best_count].step
    limits = []
    for share in SPEED_FRACTIONS:
        below = [
            count for count, layout in fits.items()
            if count > best_count and layout.step.tokens_per_s_per_gpu < share * best.tokens_per_s_per_gpu
        ]  # fmt: skip
        if below:
            count = min(below)
            limits.append(
                ScalingLimit(share=share, world_size=count, part=fastest_growing_part(best, fits[count].step))
            )
    return limits


def fastest_growing_part(before: StepTime, after: StepTime) -> str:
    """The part of a step whose GPU seconds per token grew the most."""

    def cost(step: StepTime, name: str) -> float:
        return step.parts.get(name, 0.0) * step.num_gpus / step.tokens

    return max(after.parts, key=lambda name: cost(after, name) - cost(before, name))


def with_network(gpu: Gpu, gbit_per_s: Optional[float]) -> Gpu:
    """The GPU with another network bandwidth, in Gbit/s."""
    return gpu if gbit_per_s is None else dataclasses.replace(gpu, network_bytes_per_s=gbit_per_s * 1e9 / 8)
