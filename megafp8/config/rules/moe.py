"""Rules about the layout, kernels and recipes of mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import derived, mixture, precision_map
from megafp8.config.features import given_flags
from megafp8.config.grouped_experts import fc1_choices, grouped_expert_problems, peer_problems, shares_input_codes
from megafp8.config.rules.base import all_positive, no_effect_without
from megafp8.config.schema import RunConfig
from megafp8.recipes import registry
from megafp8.utils.integers import fitting_size, round_up

PADDING = "--moe-router-padding-for-quantization (or --moe-router-padding-for-fp8)"


def expert_ranks_divide_the_experts(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every expert-parallel rank has equally many experts."""
    experts, ranks = config.model.num_experts, config.parallel.expert_model_parallel_size
    if mixture.is_mixture(config.model) and experts is not None and all_positive(ranks) and experts % ranks:
        yield (
            f"--num-experts {experts} is not divisible by --expert-model-parallel-size {ranks} ({experts} / {ranks} = "
            f"{experts / ranks:.4g}): use --expert-model-parallel-size {fitting_size(ranks, experts)}, or "
            f"another model with {round_up(experts, ranks)} experts"
        )


def expert_ranks_divide_the_world(config: RunConfig, world_size: int) -> Iterator[str]:
    """The ranks of a pipeline stage are a multiple of expert tensor x expert, the ranks that divide the experts."""
    parallel = config.parallel
    etp, ep, pp = (
        mixture.expert_tensor_size(parallel), parallel.expert_model_parallel_size, parallel.pipeline_model_parallel_size
    )  # fmt: skip
    if not mixture.is_mixture(config.model) or not all_positive(etp, ep, pp, world_size):
        return
    if world_size % (etp * ep * pp):
        yield (
            f"world size {world_size} is not a multiple of expert tensor x expert x pipeline parallel size = {etp} x "
            f"{ep} x {pp} = {etp * ep * pp}: start {round_up(world_size, etp * ep * pp)} ranks, or change "
            "--expert-model-parallel-size or --expert-tensor-parallel-size"
        )


def experts_need_sequence_parallelism(config: RunConfig, world_size: int) -> Iterator[str]:
    """Without sequence parallelism, tensor-parallel ranks would route the same tokens twice."""
    parallel = config.parallel
    if mixture.is_mixture(config.model) and parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield (
            f"--num-experts with --tensor-model-parallel-size {parallel.tensor_model_parallel_size} needs "
            "--sequence-parallel, so that each token is routed once: add it"
        )


def expert_tensor_ranks_divide_the_experts(config: RunConfig, world_size: int) -> Iterator[str]:
    """Tensor-parallel ranks have equal parts of an expert; experts with biases are not divided."""
    model, ranks = config.model, mixture.expert_tensor_size(config.parallel)
    if not mixture.is_mixture(model) or not all_positive(ranks, model.hidden_size):
        return
    width = mixture.moe_ffn_hidden_size(model)
    if width % ranks:
        yield (
            f"--moe-ffn-hidden-size {width} is not divisible by {ranks} expert tensor-parallel ranks: use "
            f"--expert-tensor-parallel-size {fitting_size(ranks, width)}, or another model with "
            f"{round_up(width, ranks)}"
        )
    if model.add_bias_linear and ranks > 1:
        yield (
            f"biases of experts are not divided over {ranks} expert tensor-parallel ranks: give --disable-bias-linear, "
            "or --expert-tensor-parallel-size 1"
        )


def padding_is_for_quantized_experts(config: RunConfig, world_size: int) -> Iterator[str]:
    """More tokens for an expert only serve quantized GEMMs, and the allgather dispatcher does not support them."""
    if not config.model.moe_router_padding_for_quantization:
        return
    if not derived.used_recipes(config.precision):
        yield no_effect_without(PADDING, "--fp8-format or --fp4-format")
    elif mixture.token_dispatcher(config) == "allgather":
        yield f"{PADDING} with --moe-token-dispatcher-type allgather: use alltoall"


def expert_sizes_suit_the_recipe(config: RunConfig, world_size: int) -> Iterator[str]:
    """The sizes of experts suit the GEMMs of the recipe. Their tokens are padded."""
    model, parallel = config.model, config.parallel
    align = derived.gemm_alignment(config.precision)
    if not mixture.is_mixture(model) or model.hidden_size is None or align == 1:
        return
    strictest = max(derived.used_recipes(config.precision), key=lambda recipe: recipe.gemm_alignment)
    sizes = [("--moe-ffn-hidden-size", mixture.moe_ffn_hidden_size(model), mixture.expert_tensor_size(parallel))]
    if model.moe_shared_expert_intermediate_size is not None:
        shared = model.moe_shared_expert_intermediate_size
        sizes.append(("--moe-shared-expert-intermediate-size", shared, parallel.tensor_model_parallel_size))
    for flag, size, ranks in sizes:
        if all_positive(size, ranks) and size % ranks == 0 and size // ranks % align:
            yield (
                f"{flag} {size} / {ranks} = {size // ranks} channels per rank: {strictest.name} needs multiples of "
                f"{align}; use {flag} {round_up(size, align * ranks)}"
            )


def peer_dispatcher_has_its_parts(config: RunConfig, world_size: int) -> Iterator[str]:
    """GPUs write into each other's memory for experts that run in one launch, on the ranks of one node."""
    if config.parallel.moe_token_dispatcher_type != mixture.PEER or not mixture.is_mixture(config.model):
        return
    if problem := next(peer_problems(config), None):
        yield f"--moe-token-dispatcher-type peer does not support {problem}: change that, or use alltoall"


def flex_dispatcher_has_its_parts(config: RunConfig, world_size: int) -> Iterator[str]:
    """The libraries of the flex dispatcher send BF16 tokens and FP32 scores between ranks; DeepEP pads no capacity."""
    flag, parallel, model = "--moe-token-dispatcher-type flex", config.parallel, config.model
    library, num_sms = mixture.exchange_library(config), parallel.moe_flex_dispatcher_num_sms
    if parallel.moe_enable_deepep and mixture.is_mixture(model) and library != "DeepEP":
        yield f"--moe-enable-deepep needs {flag} and --moe-flex-dispatcher-backend deepep: give them, or remove it"
    if library is None:
        return
    if library == "DeepEP" and num_sms is not None and num_sms % 2:
        yield f"--moe-flex-dispatcher-num-sms {num_sms}: DeepEP needs an even number; use {num_sms + 1}"
    if parallel.expert_model_parallel_size * mixture.expert_tensor_size(parallel) == 1:
        yield f"{flag} with one expert-parallel rank: give --expert-model-parallel-size 2 or more, or use alltoall"
    if not config.precision.bf16:
        yield f"{flag}: {library} sends tokens in BF16; give --bf16, or use alltoall"
    if mixture.router_dtype(model) != "fp32":
        yield f"{flag}: {library} sends scores in FP32; use --moe-router-dtype fp32, or alltoall"
    if library == "DeepEP" and model.moe_pad_expert_input_to_capacity:
        yield (
            f"{flag}: DeepEP does not support --moe-pad-expert-input-to-capacity; remove it, or use "
            "--moe-flex-dispatcher-backend hybridep"
        )
    if config.precision.deterministic_mode:
        yield f"{flag} with --deterministic-mode: {library} was not tested to give the same bits twice; use alltoall"


def dispatch_in_fp8_sends_codes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Codes travel between expert-parallel ranks only as what the experts multiply, under one scale for an expert."""
    parallel, flag = config.parallel, "--moe-dispatch-in-fp8"
    if not parallel.moe_dispatch_in_fp8:
        return
    if not mixture.is_mixture(config.model) or parallel.expert_model_parallel_size == 1:
        yield no_effect_without(flag, "--expert-model-parallel-size 2 or more")
        return
    if mixture.token_dispatcher(config) != "alltoall":
        yield f"{flag} with --moe-token-dispatcher-type {mixture.token_dispatcher(config)}: use alltoall"
    if parallel.moe_shared_expert_overlap:
        yield f"{flag} with --moe-shared-expert-overlap: remove one"
    if config.model.moe_apply_probs_on_input:
        yield f"{flag} with --moe-apply-probs-on-input, which multiplies the tokens after the exchange: remove one"
    choices = {choice for choice in fc1_choices(config) if choice.is_quantized}
    if not choices:
        yield no_effect_without(flag, "experts in FP8")
    for choice in sorted(choices, key=str):
        recipe = precision_map.build_linear_recipe(config.precision, choice)
        if recipe is None or not shares_input_codes(recipe):
            known = ", ".join(each.name for each in registry.recipes() if shares_input_codes(each.rules()))
            yield (
                f"{flag}: experts with linear_fc1 in {choice} do not multiply the same codes under one scale in fprop "
                f"and wgrad; use {known} for all of it, with wgrad in FP8"
            )


def experts_have_no_fused_operations(config: RunConfig, world_size: int) -> Iterator[str]:
    """Features whose kernels and buffers are for dense MLPs."""
    if not mixture.is_mixture(config.model):
        return
    for flag in given_flags(config, ("--residual-norm-fusion", "--tp-comm-overlap")):
        yield f"{flag} is for dense models: the number of tokens of an expert varies; remove it"


def expert_kernels_suit_the_experts(config: RunConfig, world_size: int) -> Iterator[str]:
    """--moe-expert-kernels triton is for experts that it can compute."""
    if config.parallel.moe_expert_kernels is None:
        return
    if not mixture.is_mixture(config.model):
        yield no_effect_without(f"--moe-expert-kernels {config.parallel.moe_expert_kernels}", "--num-experts")
    elif config.parallel.moe_expert_kernels == "triton" and (problems := list(grouped_expert_problems(config))):
        yield f"--moe-expert-kernels triton does not support {'; '.join(problems)}: change these, or remove it"


def experts_recompute_what_they_have(config: RunConfig, world_size: int) -> Iterator[str]:
    """Modules of selective recomputation are part of the model."""
    model, modules = config.model, derived.recompute_modules(config.training)
    if config.training.moe_layer_recompute and derived.recompute_granularity(config.training) == "full":
        yield "--moe-layer-recompute with --recompute-granularity full, which recomputes every layer: remove one"
    if not mixture.is_mixture(model):
        for name in ("moe", "moe_act", "shared_experts"):
            if name in modules:
                yield no_effect_without(f"--recompute-modules {name}", "--num-experts")
        return
    if "shared_experts" in modules and model.moe_shared_expert_intermediate_size is None:
        yield no_effect_without("--recompute-modules shared_experts", "--moe-shared-expert-intermediate-size")
    if "shared_experts" in modules and config.parallel.moe_shared_expert_overlap:
        yield "--recompute-modules shared_experts with --moe-shared-expert-overlap: remove one"
    if "moe_act" in modules and not config.parallel.moe_grouped_gemm:
        yield "--recompute-modules moe_act is for grouped GEMMs: give --moe-grouped-gemm"
