"""Search of parallel layouts: every legal way to place a run on its GPUs, with its memory and step time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from megafp8.config import derived, mixture, rules
from megafp8.config.schema import RunConfig
from megafp8.config.settings import value_of, with_values
from megafp8.device import capability
from megafp8.device.gpus import Gpu
from megafp8.planning.planned_run import CALIBRATION, Calibration, PlannedRun
from megafp8.planning.step_time import StepTime, step_time
from megafp8.resources.automatic import with_choices
from megafp8.resources.memory import MemoryEstimate, cuda_graph_memory_bytes, estimate_stages
from megafp8.resources.mixture_memory import FREE_MEMORY_FRACTION, non_torch_bytes
from megafp8.resources.savings import GRANULARITY, MICRO, SEQUENCE, TENSOR, recomputations

# ---- The ways to split the layers of a model over pipeline stages that the layout search tries ----------------------
# Stages have as many layers where these divide. Otherwise the first and the last stage have fewer, which also balances
# the embedding and the output layer: with --account-for-embedding-in-pipeline-split and
# --account-for-loss-in-pipeline-split where one layer less on each is enough, else with
# --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers.

CHUNKS = "parallel.num_virtual_stages_per_pipeline_rank"
LAYERS_PER_CHUNK = "parallel.num_layers_per_virtual_pipeline_stage"
LAYOUT = "parallel.pipeline_model_parallel_layout"
FIRST, LAST = "parallel.decoder_first_pipeline_num_layers", "parallel.decoder_last_pipeline_num_layers"
EMBEDDING = "parallel.account_for_embedding_in_pipeline_split"
LOSS = "parallel.account_for_loss_in_pipeline_split"
UNEVEN = (LAYOUT, FIRST, LAST, EMBEDDING, LOSS)

Split = dict[str, Any]
"""Values of settings by name."""


def pipeline_sizes(num_layers: int) -> list[int]:
    """Pipeline-parallel sizes to try: divisors of the number of layers, and powers of two, which divide nodes."""
    powers = [2**exponent for exponent in range(1, num_layers.bit_length()) if 2 * 2**exponent <= num_layers]
    return sorted({*divisors(num_layers), *powers})


def stage_splits(config: RunConfig, pipeline: int, given: Collection[str]) -> list[Split]:
    """Settings of the stages and their model chunks for a pipeline-parallel size; most are not checked by the rules.

    Args:
        given: settings that are fixed to their value in `config`.
    """
    assert config.model.num_layers is not None
    is_given = any(name in given for name in UNEVEN)
    split = {} if is_given else uneven_ends(config.model.num_layers, pipeline)
    if CHUNKS in given or LAYERS_PER_CHUNK in given or LAYOUT in given or pipeline == 1:
        return [split]
    values = {name: value_of(config, name) for name in UNEVEN} | split
    sizes = divided_sizes(config.model.num_layers, pipeline, values)
    chunks = divisors(math.gcd(*sizes)) if min(sizes) > 0 else [1]
    return [split | {CHUNKS: None if number == 1 else number} for number in chunks]


def uneven_ends(num_layers: int, pipeline: int) -> Split:
    """Settings that make the first and the last stage shorter where the layers do not divide; empty where they do.

    They are also empty where the ends would have no layers, which the rules then report as layers that do not divide.
    """
    size = -(-num_layers // pipeline)
    missing = size * pipeline - num_layers
    if not missing or pipeline == 1:
        return {}
    if missing <= 2:
        return {LOSS: True} if missing == 1 else {EMBEDDING: True, LOSS: True}
    first, last = size - missing // 2, size - (missing - missing // 2)
    return {FIRST: first, LAST: last} if last >= 1 else {}


def divided_sizes(num_layers: int, pipeline: int, values: Split) -> list[int]:
    """Numbers of layers that model chunks must divide: those of the different stages."""
    ends = [values[name] for name in (FIRST, LAST) if values[name] is not None]
    if not ends:
        return [(num_layers + values[EMBEDDING] + values[LOSS]) // pipeline]
    num_others = pipeline - len(ends)
    return [*ends, *([(num_layers - sum(ends)) // num_others] if num_others else [])]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# ----------------------------------------------------------------------------------------------------------------------

PIPELINE, CONTEXT = "parallel.pipeline_model_parallel_size", "parallel.context_parallel_size"
EXPERT, EXPERT_TENSOR = "parallel.expert_model_parallel_size", "parallel.expert_tensor_parallel_size"
MAX_EXPERT_PARALLEL = 64
MAX_MICRO_BATCH_SIZE, MAX_MICRO_BATCH_TOKENS = 32, 2**16
MAX_CONTEXT_PARALLEL = 16
MIXTURE_PIPELINES, MIN_MIXTURE_TOKENS, MAX_MIXTURE_TOKENS = (1, 2, 4, 8, 16), 4096, 2**14
MAX_MIXTURE_SPLITS = 2
"""Pipeline sizes, least tokens per context-parallel rank, most tokens of a microbatch and numbers of model chunks that
are tried for mixtures, whose search has expert-parallel sizes as well."""
FEW_EXPERTS = 16
"""Experts are divided over tensor-parallel ranks only where there are at most as many: others are small."""
MIN_TOKENS_PER_CONTEXT_RANK = 1024


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """A legal layout that fits: its settings, its memory and its step time.

    Attributes:
        config: the settings of its command line, some of them automatic.
        run: with a value for each automatic setting.
        memory: of the pipeline stage that needs the most.
        cuda_graph_bytes: additional memory for statistics steps and validation when steps are a CUDA graph.
    """

    config: RunConfig
    run: PlannedRun
    memory: MemoryEstimate
    cuda_graph_bytes: int
    non_torch_bytes: int
    step: StepTime

    @property
    def memory_bytes(self) -> int:
        """Memory of a process on the GPU that needs the most."""
        return self.memory.total_bytes + self.cuda_graph_bytes + self.non_torch_bytes

    @property
    def name(self) -> str:
        """For example `TP 8 PP 4 VPP 5 DP 16, micro batch 1, full recompute`."""
        run, training = self.run, self.run.config.training
        sizes = {"TP": run.sizes.tensor, "PP": run.pipeline, "VPP": run.chunks, "CP": run.context, "DP": run.data}
        if mixture.is_mixture(run.config.model):
            sizes["EP"] = run.config.parallel.expert_model_parallel_size
            sizes["ETP"] = mixture.expert_tensor_size(run.config.parallel)
        text = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one GPU"
        text += f", micro batch {training.micro_batch_size}"
        if not run.sizes.is_even:
            layers = [len(run.sizes.layers[stage]) for stage in run.sizes.stage_kinds]
            text += f", stages of {', '.join(map(str, layers))} layers"
        granularity = derived.recompute_granularity(training)
        if granularity == "full":
            return text + ", full recompute"
        return text + (f", recompute {' '.join(derived.recompute_modules(training))}" if granularity else "")


@dataclass(frozen=True, kw_only=True)
class LayoutSearch:
    """The result of a search for one number of GPUs.

    Attributes:
        layouts: those that fit, the fastest first.
        num_tried: layouts whose sizes multiply to the number of GPUs.
        num_legal: layouts that violate no rule.
        smallest_bytes: memory of the legal layout that needs the least.
        common_problems: problems of every illegal layout. The given settings cause them, not the searched ones.
        nearest: the layout with the fewest problems, and these problems.
    """

    world_size: int
    layouts: list[PlannedLayout]
    num_tried: int
    num_legal: int
    smallest_bytes: Optional[int]
    common_problems: list[str]
    nearest: Optional[tuple[RunConfig, list[str]]]


def find_layouts(
    config: RunConfig,
    gpu: Gpu,
    world_size: int,
    padded_vocab: Callable[[RunConfig], int],
    given: Collection[str] = (),
    calibration: Calibration = CALIBRATION,
    document_length: Optional[float] = None,
) -> LayoutSearch:
    """Find all legal layouts that fit, sorted by predicted speed.

    Args:
        padded_vocab: vocabulary size after padding, which depends on the tensor-parallel size of a configuration.
        given: settings that are fixed to their value in `config`, for example `parallel.tensor_model_parallel_size`.
        document_length: see `PlannedRun`.
    """
    layouts, sizes, illegal = [], [], []
    for candidate in candidates(config, gpu, world_size, given):
        chosen = with_choices(candidate, gpu, world_size, given)
        if problems := rules.setting_problems(chosen, world_size):
            illegal.append((candidate, problems))
            continue
        run = PlannedRun(
            config=chosen, gpu=gpu, world_size=world_size, padded_vocab=padded_vocab(chosen), calibration=calibration,
            document_length=document_length,
        )  # fmt: skip
        estimates = estimate_stages(run.sizes)
        memory = max(estimates, key=lambda estimate: estimate.total_bytes)
        graph_bytes, other_bytes = cuda_graph_memory_bytes(run.sizes, memory), non_torch_bytes(chosen, world_size)
        sizes.append(memory.total_bytes + graph_bytes + other_bytes)
        if sizes[-1] <= gpu.memory_bytes * (1 - FREE_MEMORY_FRACTION):
            layouts.append(PlannedLayout(
                config=candidate, run=run, memory=memory, cuda_graph_bytes=graph_bytes, non_torch_bytes=other_bytes,
                step=step_time(run),
            ))  # fmt: skip
    # Among equally fast layouts, the one that needs less memory comes first.
    layouts.sort(key=lambda layout: (layout.step.seconds / layout.step.tokens, layout.memory_bytes))
    nearest = min(illegal, key=lambda layout: len(layout[1]), default=None)
    return LayoutSearch(
        world_size=world_size, layouts=layouts, num_tried=len(sizes) + len(illegal), num_legal=len(sizes),
        smallest_bytes=min(sizes, default=None), nearest=nearest,
        common_problems=[text for text in nearest[1] if all(text in other for _, other in illegal)] if nearest else [],
    )  # fmt: skip


def machine_problems(config: RunConfig, gpu: Gpu) -> list[str]:
    """Problems of the configuration on this GPU that hold for every layout.

    A recipe that Transformer Engine has for other GPUs only is a problem. One that it does not have at all is planned
    as emulated.
    """
    is_emulated = any(not recipe.native_capabilities for recipe in derived.used_recipes(config.precision))
    return capability.capability_problems(with_values(config, {"precision.emulation": is_emulated}), gpu.target)


def candidates(config: RunConfig, gpu: Gpu, world_size: int, given: Collection[str]) -> Iterator[RunConfig]:
    """Yield all layouts whose sizes multiply to the number of GPUs, most of them not yet checked against the rules."""
    layers, seq = config.model.num_layers, config.data.seq_length
    sizes = [value_of(config, name) for name in (TENSOR, CONTEXT, PIPELINE) if name in given]
    if not layers or not seq or min(sizes, default=1) < 1:
        # One candidate is enough for the rules to report what is missing.
        yield config if MICRO in given else with_values(config, {MICRO: 1})
        return
    is_routed = mixture.is_mixture(config.model)
    least_tokens = MIN_MIXTURE_TOKENS if is_routed else MIN_TOKENS_PER_CONTEXT_RANK
    tensors = _choices(config, given, TENSOR, _powers_of_two(min(gpu.gpus_per_node, world_size)))
    contexts = _choices(config, given, CONTEXT, _powers_of_two(min(MAX_CONTEXT_PARALLEL, seq // least_tokens)))
    sizes = [size for size in pipeline_sizes(layers) if not is_routed or size in MIXTURE_PIPELINES]
    pipelines = _choices(config, given, PIPELINE, sizes)
    most_tokens = MAX_MIXTURE_TOKENS if is_routed else MAX_MICRO_BATCH_TOKENS
    micros = _choices(config, given, MICRO, _powers_of_two(min(MAX_MICRO_BATCH_SIZE, most_tokens // seq)))
    is_given = GRANULARITY in given or "training.recompute_activations" in given
    recomputes = ({},) if is_given else recomputations(config.model)
    for tensor, context, pipeline in itertools.product(tensors, contexts, pipelines):
        if world_size % (tensor * context * pipeline):
            continue
        # Context parallelism together with a larger micro batch is the same work with more communication.
        micro_batches = micros if context == 1 or len(contexts) == 1 else micros[:1]
        splits = stage_splits(config, pipeline, given)
        splits = splits[:MAX_MIXTURE_SPLITS] if is_routed else splits
        experts = expert_layouts(config, tensor, world_size // pipeline, given)
        for split, micro, recompute, expert in itertools.product(splits, micro_batches, recomputes, experts):
            sizes_chosen = {TENSOR: tensor, CONTEXT: context, PIPELINE: pipeline, MICRO: micro}
            sequence = {} if SEQUENCE in given else {SEQUENCE: tensor > 1}
            yield with_values(config, {**sizes_chosen, **split, **recompute, **expert, **sequence})


def expert_layouts(config: RunConfig, tensor: int, num_ranks: int, given: Collection[str]) -> list[dict[str, Any]]:
    """Expert- and expert tensor-parallel sizes to try; one without settings for a dense model.

    Experts are complete on a rank; a few large ones are also divided as the other layers are.

    Args:
        num_ranks: of one pipeline stage.
    """
    if not mixture.is_mixture(config.model):
        return [{}]
    assert config.model.num_experts is not None
    sizes = _choices(config, given, EXPERT, _powers_of_two(min(MAX_EXPERT_PARALLEL, config.model.num_experts)))
    is_divided = config.model.num_experts <= FEW_EXPERTS
    splits = _choices(config, given, EXPERT_TENSOR, sorted({1, tensor}) if is_divided else [1])
    pairs = [(size, split) for size in sizes for split in splits if num_ranks % (size * (split or tensor)) == 0]
    return [{EXPERT: size, EXPERT_TENSOR: split} for size, split in pairs]


def _choices(config: RunConfig, given: Collection[str], name: str, choices: Sequence[int]) -> Sequence[int]:
    return (value_of(config, name),) if name in given else choices


def _powers_of_two(largest: int) -> list[int]:
    return [2**exponent for exponent in range(max(1, largest).bit_length())]
