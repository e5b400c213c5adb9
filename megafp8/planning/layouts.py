"""Every way to spread a run over its GPUs that the rules of the configuration allow, and what each costs.

What passes beside a step's CUDA graph need: memory of their own.

A graph keeps the memory that its passes went through while it was captured, and nothing else may have it between two
launches. So a step that is looked at, which runs kernel by kernel, has its activations and logits a second time, and a
validation has its logits and one layer's activations. They share what they get, as they come one after the other. Steps
before the capture need nothing here: torch gives what they leave back to the device first. Quantized weights are kept
between passes, and passes beside the graph write to the graph's.

Reckoned from how torch's allocator and Transformer Engine's layers work, not measured: the peaks that runs record are
of tensors, and what a graph keeps between its launches is none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from megafp8.config import derived, rules
from megafp8.config.schema import RunConfig
from megafp8.config.settings import value_of, with_values
from megafp8.device import capability
from megafp8.device.gpus import Gpu
from megafp8.planning.memory import MemoryEstimate, estimate_ends, layer_activations, outside_bytes
from megafp8.planning.planned_run import CALIBRATION, Calibration, PlannedRun
from megafp8.planning.step_time import StepTime, step_time

TENSOR, PIPELINE = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
CONTEXT, SEQUENCE = "parallel.context_parallel_size", "parallel.sequence_parallel"
CHUNKS, LAYERS_OF_CHUNK = (
    "parallel.num_virtual_stages_per_pipeline_rank",
    "parallel.num_layers_per_virtual_pipeline_stage",
)
MICRO = "training.micro_batch_size"
GRANULARITY, METHOD = "training.recompute_granularity", "training.recompute_method"
NUM_LAYERS, MODULES = "training.recompute_num_layers", "training.recompute_modules"
RECOMPUTE: tuple[dict[str, Any], ...] = (
    {},
    {GRANULARITY: "selective", MODULES: ("mlp",)},
    {GRANULARITY: "full", METHOD: "uniform", NUM_LAYERS: 1},
)
LARGEST_MICRO, MOST_TOKENS = 32, 2**16
"""Of a micro batch: sequences, and tokens."""
LARGEST_CONTEXT = 16
SHORTEST_PART = 1024
"""Tokens of a sequence that a context-parallel rank has at least."""
MARGIN_FRACTION = 0.05
"""Of the memory, kept free for fragmentation."""


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """One legal layout: its settings, its memory, and the time of a step where it fits."""

    run: PlannedRun
    memory: MemoryEstimate
    """Of the stage that needs the most."""
    beside_graph_bytes: int
    """Of looks and validations, where steps are a CUDA graph."""
    outside_bytes: int
    step: StepTime

    @property
    def memory_bytes(self) -> int:
        """All that a process takes on the fullest GPU."""
        return self.memory.total_bytes + self.beside_graph_bytes + self.outside_bytes

    @property
    def name(self) -> str:
        """`TP 8 PP 4 VPP 5 CP 1 DP 16, micro batch 1, full recompute`."""
        run, training = self.run, self.run.config.training
        sizes = {"TP": run.tensor, "PP": run.pipeline, "VPP": run.chunks, "CP": run.context, "DP": run.data}
        text = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one GPU"
        text += f", micro batch {training.micro_batch_size}"
        granularity = derived.recompute_granularity(training)
        if granularity == "full":
            return text + ", full recompute"
        return text + (f", recompute {' '.join(derived.recompute_modules(training))}" if granularity else "")


@dataclass(frozen=True, kw_only=True)
class Found:
    """All layouts of one number of GPUs.

    Attributes:
        layouts: those that fit, the fastest first.
        num_tried: whose sizes multiply to the GPUs.
        num_legal: that break no rule.
        smallest_bytes: memory of the legal layout that needs the least.
        common_problems: what every layout breaks: not what the search chose is at fault, but what was given.
        nearest: the layout that breaks the fewest rules, and what it breaks.
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
) -> Found:
    """Every legal layout, what fits sorted by predicted speed.

    Args:
        padded_vocab: rows of a configuration's embedding, which depend on its tensor-parallel size.
        given: settings that stay as they are in `config`, for example `parallel.tensor_model_parallel_size`.
    """
    layouts, sizes, broken = [], [], []
    for candidate in candidates(config, gpu, world_size, given):
        if problems := rules.setting_problems(candidate, world_size):
            broken.append((candidate, problems))
            continue
        run = PlannedRun(
            config=candidate, gpu=gpu, world_size=world_size, padded_vocab=padded_vocab(candidate),
            calibration=calibration,
        )  # fmt: skip
        estimates = estimate_ends(candidate, world_size, run.padded_vocab)
        memory = max(estimates, key=lambda estimate: estimate.total_bytes)
        beside, outside = outside_graph_bytes(candidate, memory), outside_bytes(candidate, world_size)
        sizes.append(memory.total_bytes + beside + outside)
        if sizes[-1] <= gpu.memory_bytes * (1 - MARGIN_FRACTION):
            layouts.append(
                PlannedLayout(
                    run=run, memory=memory, beside_graph_bytes=beside, outside_bytes=outside, step=step_time(run)
                )
            )  # fmt: skip
    # Of equally fast layouts the one that needs less memory.
    layouts.sort(key=lambda layout: (layout.step.seconds / layout.step.tokens, layout.memory_bytes))
    nearest = min(broken, key=lambda layout: len(layout[1]), default=None)
    others = [set(problems) for _, problems in broken]
    return Found(
        world_size=world_size, layouts=layouts, num_tried=len(sizes) + len(broken), num_legal=len(sizes),
        smallest_bytes=min(sizes, default=None), nearest=nearest,
        common_problems=[text for text in nearest[1] if all(text in other for other in others)] if nearest else [],
    )  # fmt: skip


def machine_problems(config: RunConfig, gpu: Gpu) -> list[str]:
    """What the GPU does not have, whatever the layout. Recipes that Transformer Engine has for other GPUs only are not
    planned as emulated ones; those that it does not have at all are."""
    is_emulated = any(not recipe.native_capabilities for recipe in derived.used_recipes(config.precision))
    return capability.problems(with_values(config, {"precision.emulation": is_emulated}), gpu.target)


def candidates(config: RunConfig, gpu: Gpu, world_size: int, given: Collection[str]) -> Iterator[RunConfig]:
    """Layouts whose sizes multiply to the GPUs; most rules are not asked yet."""
    layers, seq = config.model.num_layers, config.data.seq_length
    sizes = [value_of(config, name) for name in (TENSOR, CONTEXT, PIPELINE) if name in given]
    if not layers or not seq or min(sizes, default=1) < 1:
        # The rules say what is missing; of the rest nothing is.
        yield config if MICRO in given else with_values(config, {MICRO: 1})
        return
    tensors = _choices(config, given, TENSOR, _powers_of_two(min(gpu.gpus_per_node, world_size)))
    contexts = _choices(config, given, CONTEXT, _powers_of_two(min(LARGEST_CONTEXT, seq // SHORTEST_PART)))
    pipelines = _choices(config, given, PIPELINE, _divisors(layers))
    micros = _choices(config, given, MICRO, _powers_of_two(min(LARGEST_MICRO, MOST_TOKENS // seq)))
    is_given = GRANULARITY in given or "training.recompute_activations" in given
    recomputes = ({},) if is_given else RECOMPUTE
    for tensor, context, pipeline in itertools.product(tensors, contexts, pipelines):
        if world_size % (tensor * context * pipeline):
            continue
        # More ranks for a sequence and then more sequences a rank is the same work with more communication.
        sequences = micros if context == 1 or len(contexts) == 1 else micros[:1]
        for chunks, micro, recompute in itertools.product(
            _chunk_choices(config, given, layers, pipeline), sequences, recomputes
        ):
            values = {TENSOR: tensor, CONTEXT: context, PIPELINE: pipeline, MICRO: micro, **chunks, **recompute}
            if SEQUENCE not in given:
                values[SEQUENCE] = tensor > 1
            yield with_values(config, values)


def _choices(config: RunConfig, given: Collection[str], name: str, choices: Sequence[int]) -> Sequence[int]:
    return (value_of(config, name),) if name in given else choices


def _chunk_choices(
    config: RunConfig, given: Collection[str], layers: int, pipeline: int
) -> Iterator[dict[str, Optional[int]]]:
    """Chunks of the interleaved schedule, from none to one for each layer."""
    if CHUNKS in given or LAYERS_OF_CHUNK in given:
        yield {}
        return
    yield {CHUNKS: None}
    if pipeline > 1:
        yield from ({CHUNKS: chunks} for chunks in _divisors(layers // pipeline) if chunks > 1)


def _powers_of_two(largest: int) -> list[int]:
    return [2**exponent for exponent in range(max(1, largest).bit_length())]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def outside_graph_bytes(
    config: RunConfig, estimate: MemoryEstimate, *, implementation: str = "transformer_engine"
) -> int:
    """Bytes of a rank beside its graph; 0 for a run without one, or without looks and validations.

    Args:
        estimate: of that rank.
    """
    if not derived.has_step_graph(config):
        return 0
    if config.logging.fp8_log_interval is not None:
        return estimate.activations_bytes + estimate.logits_bytes + estimate.buffers_bytes
    if config.training.eval_iters:
        return layer_activations(config, implementation=implementation).total + estimate.logits_bytes
    return 0
