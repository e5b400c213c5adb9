"""Whether a run fits into the memory of its GPUs, by the estimate of `memory.py`, and what makes it fit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megafp8.config import derived, mixture, model_shapes, rules
from megafp8.config.layer_backends import TRANSFORMER_ENGINE
from megafp8.config.micro_batch_sizes import possible_sizes
from megafp8.config.precision_map import GEMMS
from megafp8.config.rules import cuda_graph
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import RunConfig
from megafp8.config.settings import settings_by_name, with_values
from megafp8.planning.compute import cast_s, gemm_s, grad_output_rows
from megafp8.planning.mixture_time import expert_warnings
from megafp8.planning.planned_run import PlannedRun, layer_gemms, layer_linears
from megafp8.planning.step_time import step_time
from megafp8.resources.automatic import Values
from megafp8.resources.memory import estimate_stages
from megafp8.resources.micro_batch import gib
from megafp8.resources.mixture_memory import FREE_MEMORY_FRACTION, non_torch_bytes
from megafp8.resources.recipe_shares import BF16
from megafp8.resources.savings import MICRO, low_moments, recomputations

# ---- Predicted speedup of FP8 over BF16: per linear, including its casts, and for the complete step -----------------
# The times are the planner's (`compute`, `step_time`). A linear quantizes its input and its grad_output once per
# microbatch, each in both orientations, and its weight once per step.

MIN_SPEEDUP = 1.05
"""A quantized step that is less than this many times as fast as BF16 gets a warning."""
BF16_SETTINGS = {"precision.fp8_format": None, "precision.fp4_format": None, "precision.fp8_param_gather": False,
                  "precision.precision_map": (), "precision.fp8_schedule": None}  # fmt: skip


@dataclass(frozen=True)
class LinearGain:
    """One linear of a layer on one rank, for one microbatch.

    Attributes:
        bf16_s: seconds of its three GEMMs in BF16.
        quantized_s: seconds of its three GEMMs under the recipe.
        casts_s: seconds of quantizing its operands.
    """

    linear: model_shapes.GemmDimensions
    bf16_s: float
    quantized_s: float
    casts_s: float

    @property
    def speedup(self) -> float:
        """Over BF16, casts included."""
        return self.bf16_s / (self.quantized_s + self.casts_s)


def linear_gains(run: PlannedRun) -> list[LinearGain]:
    """The linears of a layer without routed experts, in the order of the forward pass."""
    recipes = dict.fromkeys(GEMMS, run.recipe)
    if not run.config.precision.fp8_wgrad:
        recipes["wgrad"] = BF16
    gains = []
    has_experts = mixture.is_mixture(run.config.model)
    for linear in layer_linears(run.config, has_experts):
        gemms = [gemm for gemm in layer_gemms(run, has_experts) if gemm.linear == linear.name]
        quantized_s = sum(gemm_s(run, recipes[gemm.kind], *gemm.shape) for gemm in gemms)
        bf16_s = sum(gemm_s(run, BF16, *gemm.shape) for gemm in gemms)
        gains.append(LinearGain(linear, bf16_s, quantized_s, linear_casts_s(run, run.recipe, linear)))
    return gains


def linear_casts_s(run: PlannedRun, recipe: str, linear: model_shapes.GemmDimensions) -> float:
    """Seconds of quantizing a linear's operands for one microbatch, with a share of the weight's cast."""
    weight_share = 1 / run.sizes.num_microbatches
    num_activations = linear.rows * linear.in_features + grad_output_rows(run, linear) * linear.out_features
    num_elements = num_activations + weight_share * linear.in_features * linear.out_features
    return cast_s(run, recipe, num_elements, 2 + weight_share)


def in_high_precision(run: PlannedRun) -> PlannedRun:
    """The same run with everything in BF16."""
    return dataclasses.replace(run, config=with_values(run.config, BF16_SETTINGS))


def fp8_warnings(run: PlannedRun) -> list[str]:
    """Warnings with reasons if a quantized step is hardly faster than BF16, or slower; empty otherwise."""
    quantized, bf16 = step_time(run), step_time(in_high_precision(run))
    speedup = bf16.seconds / quantized.seconds
    if speedup >= MIN_SPEEDUP:
        return []
    has_map = bool(run.config.precision.precision_map)
    source = "the precision map" if has_map else derived.recipe_flag(run.config.precision)
    lines = [
        f"{source} is not expected to be faster than BF16 on {run.gpu.name}: {speedup:.2f} of BF16's speed, "
        f"{1e3 * quantized.seconds:.1f} ms per step instead of {1e3 * bf16.seconds:.1f}"
    ]
    host_share = quantized.parts.get("host", 0.0) / quantized.seconds
    if host_share > 1 - 1 / MIN_SPEEDUP:
        of_layers = TRANSFORMER_ENGINE.graph_limits(run.config, has_te=True)
        has_graph = not any((*of_layers, *cuda_graph.default_graph_problems(run.config)))
        or_graph = ", or --cuda-graph-impl local" if has_graph else ""
        lines.append(
            f"kernels are so short that the GPU waits {host_share:.0%} of the step for the host, which launches more "
            f"kernels in FP8: use a larger --micro-batch-size or --seq-length{or_graph}"
        )
    slow = [
        f"{gain.linear.name} ({gain.linear.in_features} to {gain.linear.out_features} channels, "
        f"{gain.speedup:.2f} of BF16's speed)"
        for gain in linear_gains(run) if gain.speedup < MIN_SPEEDUP
    ]  # fmt: skip
    if slow and not has_map:  # with a map, the linears do not share one recipe
        lines.append("too small for FP8, including quantization: " + ", ".join(slow))
    return lines + expert_warnings(run)[1:]


# ----------------------------------------------------------------------------------------------------------------------


class MemoryVerdict(NamedTuple):
    """Whether a run fits into the memory of its GPUs, and the line that says so."""

    fits: bool
    text: str


def memory_verdict(run: PlannedRun) -> MemoryVerdict:
    """Whether a run fits, with the memory of a GPU; and the first suggestion that suffices if it does not."""
    limit_bytes = int(run.gpu.memory_bytes * (1 - FREE_MEMORY_FRACTION))
    needed, has = needed_bytes(run, run.config), gib(run.gpu.memory_bytes)
    if needed <= limit_bytes:
        return MemoryVerdict(True, f"fits: {gib(needed)} of {has} GiB a GPU")
    problem = (
        f"does not fit: needs {gib(needed)} GiB a GPU, {run.gpu.name} has {has}, less {FREE_MEMORY_FRACTION:.0%} for "
        "fragments"
    )
    for values in suggestions(run):
        changed = with_values(run.config, values)
        if not rules.setting_problems(changed, run.world_size) and needed_bytes(run, changed) <= limit_bytes:
            named = settings_by_name()
            tried = " ".join(named[name].as_flag(value) for name, value in values.items())
            return MemoryVerdict(False, f"{problem}; try {tried}")
    preset = run.config.model.model_preset
    model, others = (f" --model-preset {preset}", "") if preset else ("", " and the flags of the model")
    plan = f"megafp8 plan{model} --gpus {run.world_size} --gpu {run.gpu.name}{others}"
    return MemoryVerdict(False, f"{problem}; try {plan}")


def needed_bytes(run: PlannedRun, config: RunConfig) -> int:
    """Memory of the stage that needs the most, with what torch does not allocate; a CUDA graph's is not counted."""
    estimates = estimate_stages(run_sizes(config, run.world_size, run.padded_vocab))
    return max(each.total_bytes for each in estimates) + non_torch_bytes(config, run.world_size)


def suggestions(run: PlannedRun) -> Iterator[Values]:
    """Settings to try: smaller micro batches, then these with recomputation, then all of it with moments in 16 bits."""
    config = run.config
    size, is_recomputed = config.training.micro_batch_size, config.training.recompute_granularity is not None
    assert isinstance(size, int)
    smaller = [each for each in possible_sizes(config, run.world_size) if each < size]
    sizes: list[Values] = [{}, *({MICRO: each} for each in reversed(smaller))]
    recomputed: Sequence[Values] = [{}] if is_recomputed else recomputations(config.model)
    optimizer = config.optimizer
    moments: list[Values] = [{}] if optimizer.use_precision_aware_optimizer else [{}, low_moments(optimizer)]
    for with_moments, with_recomputation, with_size in itertools.product(moments, recomputed, sizes):
        yield {**with_size, **with_recomputation, **with_moments}
