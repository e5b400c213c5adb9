"""When all experts of a GPU run in one launch per GEMM (`models/grouped_experts.py`), and why not; and when tokens can
travel to them as codes.

Otherwise the experts are Transformer Engine's grouped linear, or an MLP each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from megafp8.config import derived, mixture, multi_token, precision_map, precision_schedule
from megafp8.config.activations import is_plain_swiglu
from megafp8.config.precision_map import EXPERTS, MLP_LINEARS, LinearChoice
from megafp8.config.schema import ModelConfig, PrecisionConfig, RunConfig
from megafp8.config.settings import with_values
from megafp8.recipes import registry
from megafp8.recipes.base import Gemm, LinearRecipe, Operand

TILE = 128
"""Widths are multiples of the kernels' tiles."""


def grouped_expert_problems(config: RunConfig) -> Iterator[str]:
    """Settings that exclude one launch for all experts."""
    model, parallel = config.model, config.parallel
    if parallel.moe_expert_kernels == "te":
        yield "--moe-expert-kernels te"
    if not is_plain_swiglu(model) or model.add_bias_linear:
        yield "experts that are not SwiGLU without biases"
    hidden = model.hidden_size
    if hidden is not None and any(size % TILE for size in (hidden, mixture.moe_ffn_hidden_size(model))):
        yield f"widths that are no multiples of {TILE}"
    yield from layout_problems(config)
    if model.moe_apply_probs_on_input:
        yield "--moe-apply-probs-on-input"
    if mixture.has_capacity(model) and model.moe_pad_expert_input_to_capacity:
        yield "--moe-pad-expert-input-to-capacity"
    if "moe_act" in derived.recompute_modules(config.training):
        yield "--recompute-modules moe_act"
    if config.training.fine_grained_activation_offloading:
        yield "--fine-grained-activation-offloading"
    if not config.precision.bf16 or config.precision.fp8_power_2_scale or config.precision.fp8_tensorwise_margin:
        yield "--fp8-power-2-scale, --fp8-tensorwise-margin or another dtype than BF16"
    if model.num_layers is None:
        return
    choices = expert_choices(model, config.precision)
    if any(choice.is_quantized for choice in choices) and not precision_map.base_choice(config.precision).is_quantized:
        yield "experts that a precision map quantizes in a model without --fp8-format"
    if len(choices) > 1 or not all(is_supported(choice) for choice in choices):
        kernels = ((each.name, each.grouped_gemm_formats) for each in registry.recipes())
        formats = [f"{name} {'/'.join(its_formats)}" for name, its_formats in kernels if its_formats]
        yield f"experts in another precision than BF16 or {', '.join(formats)}"
    elif any(splits_experts(config, phase) for phase in precision_schedule.precisions(config.precision)):
        yield "a phase of --fp8-schedule in which some linears or GEMMs of a layer's experts have another recipe"
    elif parallel.moe_expert_kernels is None and any(
        registry.get(name).te_recipe_class is None for choice in choices for name in choice.recipes
    ):
        yield "emulated experts, unless --moe-expert-kernels triton is given"


def one_launch_suggestion(config: RunConfig, is_emulated: bool = False) -> str:
    """What makes experts that run one by one run in one launch: the fewest flags, or the first problem.

    Args:
        is_emulated: the layers are emulated, whose experts run in one launch only with `--moe-expert-kernels triton`.
    """
    kernels = {"--moe-expert-kernels triton": {"parallel.moe_expert_kernels": "triton"}}
    changes: dict[str, dict[str, Any]] = {
        "--moe-token-dispatcher-type alltoall": {"parallel.moe_token_dispatcher_type": "alltoall"}
    }
    if config.precision.fp8_format is not None:
        changes["--fp8-format e4m3"] = {"precision.fp8_format": "e4m3"}
        recipes = (each for each in registry.recipes() if each.grouped_gemm_formats)
        changes |= {each.flag: {"precision.fp8_recipe": each.name} for each in recipes}
    # `te` is also what the program chose because of the problem
    free = with_values(config, {"parallel.moe_expert_kernels": "triton" if is_emulated else None})
    needed = list(kernels) if is_emulated and config.parallel.moe_expert_kernels != "triton" else []
    if not is_emulated:
        changes |= kernels
    for number in range(4):
        for flags in itertools.combinations(changes, number):
            values = {name: value for flag in flags for name, value in changes[flag].items()}
            if not any(grouped_expert_problems(with_values(free, values))):
                given = f"with {' '.join([*flags, *needed])}" if flags or needed else "without --moe-expert-kernels te"
                return f"{given} all of them run in one launch"
    return f"no other recipe or kernels help: one launch does not support {next(grouped_expert_problems(free))}"


def layout_problems(config: RunConfig) -> Iterator[str]:
    """Layouts that exclude one launch for all experts of a rank."""
    parallel = config.parallel
    has_expert_ranks = parallel.expert_model_parallel_size > 1
    if parallel.tensor_model_parallel_size > 1 and not has_expert_ranks:
        yield "tensor-parallel ranks without expert-parallel ones"
    elif mixture.expert_tensor_size(parallel) > 1:
        yield "expert tensor-parallel ranks: give --expert-tensor-parallel-size 1"
    if not has_expert_ranks:
        return
    if mixture.token_dispatcher(config) == "flex":
        yield "--moe-token-dispatcher-type flex with expert-parallel ranks"
    if parallel.moe_shared_expert_overlap:
        yield "--moe-shared-expert-overlap with expert-parallel ranks"


def peer_problems(config: RunConfig) -> Iterator[str]:
    """Settings that exclude the exchange through the memory of other GPUs."""
    parallel = config.parallel
    if parallel.expert_model_parallel_size == 1:
        yield "a single expert-parallel rank"
    if parallel.tensor_model_parallel_size > 1:
        yield f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size}"
    if parallel.moe_dispatch_in_fp8:
        yield "--moe-dispatch-in-fp8"
    yield from grouped_expert_problems(config)


def expert_choices(model: ModelConfig, precision: PrecisionConfig) -> set[LinearChoice]:
    """The recipes of the experts' linears, without the entries of phases."""
    chosen = precision_map.resolve(model, precision)
    return {choice for name, choice in chosen.items() if f".{EXPERTS}" in name and "shared" not in name}


def splits_experts(config: RunConfig, phase: PrecisionConfig) -> bool:
    """Whether the experts of a layer have, in a phase, neither the recipe of the run nor all of them none."""
    chosen = precision_map.resolve(config.model, phase)
    names = [name.removesuffix(MLP_LINEARS[0]) for name in chosen if name.endswith(f".{EXPERTS}{MLP_LINEARS[0]}")]
    layers = [{chosen[name + linear] for linear in MLP_LINEARS} for name in names]
    return any(
        layer not in ({choice} for choice in (*expert_choices(config.model, config.precision), LinearChoice()))
        for layer in layers
    )


def fc1_choices(config: RunConfig) -> set[LinearChoice]:
    """The recipes of the experts' first linears, which get the tokens; empty for an incomplete model."""
    model, precision = config.model, config.precision
    if model.num_layers is None:
        return set()
    name = EXPERTS + MLP_LINEARS[0]
    maps = [precision_map.resolve(model, each) for each in precision_schedule.precisions(precision)]
    chosen = {resolved[linear] for resolved in maps for linear in resolved if linear.endswith(f".{name}")}
    return chosen | ({precision_map.multi_token_choice(precision)} if multi_token.num_depths(model) else set())


def shares_input_codes(recipe: LinearRecipe) -> bool:
    """Whether fprop and wgrad read the same codes of the input, which have one scale."""
    rule = recipe.rule(Operand.INPUT, Gemm.FPROP)
    return rule is not None and rule.block is None and rule == recipe.rule(Operand.INPUT, Gemm.WGRAD)


def is_supported(choice: LinearChoice) -> bool:
    """Whether there are kernels for the recipe of a linear, or it has none."""
    if not choice.is_quantized:
        return True
    fprop = choice.fprop
    if fprop.recipe is None or len(set(choice)) > 1:
        return False
    return fprop.format in registry.get(fprop.recipe).grouped_gemm_formats
