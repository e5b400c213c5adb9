"""The least time of each part of a profiled step: its FLOPs at the GPU's peak, its bytes at the peak bandwidth.

FLOPs and bytes are those of the planner (`megafp8/planning/`), without its measured constants. A kernel that fuses the
norm or the activation with a cast counts as one of them: the sum of norm, activation and casts has the sum of their
floors as a bound, which each of them alone may fall below.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

from megafp8.analysis import profile
from megafp8.config import mixture
from megafp8.planning import communication, compute, step_time
from megafp8.planning.compute import LayerTime
from megafp8.planning.mixture_time import expert_gemms, experts_time
from megafp8.planning.planned_run import Calibration, LinearGemm, PlannedRun, layer_gemms, output_layer_gemms
from megafp8.recipes import registry
from megafp8.resources.recipe_shares import BACKWARD_GEMMS, BF16, FORWARD_GEMMS, output_layer_recipes

PEAK = Calibration(**{each.name: float("fraction" in each.name) for each in dataclasses.fields(Calibration)})
"""All of the peak and of the bandwidth, and no fixed costs."""
PARTS = {
    "attention": profile.ATTENTION,
    "norms": profile.NORM,
    "rotary": profile.ROPE,
    "activation": profile.ACTIVATION,
    "casts": profile.QUANTIZE,
}
"""The part of a profile by the field of the planner's time of a layer. Additions and permutations are in no part."""


def step_floors(run: PlannedRun, stage: int) -> dict[str, float]:
    """Least seconds of a step on a rank of a pipeline stage, by part of the profile; without parts that it lacks."""
    run = dataclasses.replace(run, calibration=PEAK)
    floors: dict[str, float] = defaultdict(float)
    for part, seconds in _microbatch(run, stage):
        floors[part] += seconds * run.sizes.num_microbatches
    floors[profile.QUANTIZE] += step_time.weight_casts_s(run, stage)
    floors[profile.OPTIMIZER] += step_time.optimizer_s(run, stage)
    if stage == 0:  # whose bytes the planner counts
        floors[profile.COMMUNICATION] += _communication_s(run)
    return {part: seconds for part, seconds in floors.items() if seconds > 0}


def _microbatch(run: PlannedRun, stage: int) -> Iterator[tuple[str, float]]:
    """Parts of one microbatch on a stage, forward and backward."""
    num_layers, num_expert_layers = step_time.layers_of_stage(run, stage)
    for is_backward, gemms in enumerate((FORWARD_GEMMS, BACKWARD_GEMMS)):
        for recipe, count in step_time.layer_counts(run, stage, gemms).items():
            for has_experts, num_alike in ((False, num_layers - num_expert_layers), (True, num_expert_layers)):
                if count and num_alike:
                    weight = count * num_alike / num_layers
                    for part, seconds in _layer(run, recipe, num_layers, has_experts, bool(is_backward)):
                        yield part, weight * seconds
    repeats = 1 + run.sizes.depths_on(stage)
    if stage == 0:  # the lookup, and adding to its gradient
        elements = run.sizes.tokens * run.sizes.hidden_size
        yield profile.EMBEDDING, repeats * 4 * run.memory_s(compute.BF16_BYTES * elements)
    if stage == run.pipeline - 1:
        recipes = output_layer_recipes(run.config.model, run.config.precision)
        for gemm in output_layer_gemms(run):
            recipe = recipes[gemm.kind]
            yield gemm_part(run, recipe), repeats * gemm.flops / compute.gemm_flops_per_s(run, recipe)
        yield profile.LOSS, repeats * compute.output_layer_s(run)[2]
        yield profile.QUANTIZE, repeats * sum(compute.output_layer_casts_s(run))


def _layer(
    run: PlannedRun, recipe: str, num_layers: int, has_experts: bool, is_backward: bool
) -> Iterator[tuple[str, float]]:
    """Parts of one layer in one direction; recomputation is a part of the backward pass."""
    forward, experts_forward = _layer_time(run, recipe, has_experts, is_backward=False)
    if not is_backward:
        yield gemm_part(run, recipe), forward.fprop
        yield from ((part, getattr(forward, field)) for field, part in PARTS.items())
        return
    backward, _ = _layer_time(run, recipe, has_experts, is_backward=True)
    yield gemm_part(run, recipe), backward.dgrad
    yield gemm_part(run, _wgrad_recipe(run, recipe)), backward.wgrad
    for field, part in {"fprop": gemm_part(run, recipe), **PARTS}.items():
        # Recomputation is linear in the parts of the forward pass: each of them is the only one here.
        alone = LayerTime(**{field: getattr(forward, field)})
        experts_s = getattr(experts_forward, field) if has_experts else None
        yield part, getattr(backward, field) + compute.recompute_s(run, alone, num_layers, experts_s)


def _layer_time(run: PlannedRun, recipe: str, has_experts: bool, is_backward: bool) -> tuple[LayerTime, LayerTime]:
    """The planner's time of a layer with its experts, and of its routed experts alone."""
    time = (compute.backward_time if is_backward else compute.forward_time)(run, recipe, has_experts)
    layer = _with_gemms_at_peak(run, recipe, time, layer_gemms(run, has_experts))
    if not has_experts:
        return layer, LayerTime()
    times = experts_time(run, recipe)
    gemms = expert_gemms(run) * mixture.experts_per_rank(run.config)
    experts = _with_gemms_at_peak(run, recipe, times.backward if is_backward else times.forward, gemms)
    return layer.plus(experts), experts


def _with_gemms_at_peak(run: PlannedRun, recipe: str, time: LayerTime, gemms: Sequence[LinearGemm]) -> LayerTime:
    """The time with GEMMs that take their FLOPs at the peak: the planner's have idle SMs at the end, and start late."""
    seconds: dict[str, float] = defaultdict(float)
    for gemm in gemms:
        used = _wgrad_recipe(run, recipe) if gemm.kind == "wgrad" else recipe
        seconds[gemm.kind] += gemm.flops / compute.gemm_flops_per_s(run, used)
    return dataclasses.replace(time, **{kind: each for kind, each in seconds.items() if getattr(time, kind)})


def _wgrad_recipe(run: PlannedRun, recipe: str) -> str:
    return recipe if run.config.precision.fp8_wgrad else BF16


def gemm_part(run: PlannedRun, recipe: str) -> str:
    """The part of a recipe's GEMMs; emulated ones multiply dequantized operands in BF16."""
    is_quantized = recipe != BF16 and registry.get(recipe).multiplies_codes(run.gpu.compute_capability)
    return profile.GEMM_FP8 if is_quantized else profile.GEMM_BF16


def _communication_s(run: PlannedRun) -> float:
    """Seconds of sending a step's bytes over the links of their groups, one group after another."""
    parallel = run.config.parallel
    groups = {
        "tensor parallel": communication.tensor_group(run),
        "expert parallel": communication.RankGroup(
            parallel.expert_model_parallel_size, mixture.expert_tensor_size(parallel)
        ),
        "context parallel": communication.RankGroup(run.context, run.sizes.tensor),
        "pipeline": communication.pipeline_group(run),
        "data parallel, gradients": communication.data_group(run),
        "data parallel, parameters": communication.data_group(run),
    }
    return sum(
        num_bytes / communication.peak_bytes_per_s(run, groups[name])
        for name, num_bytes in step_time.bytes_by_group(run).items()
    )
