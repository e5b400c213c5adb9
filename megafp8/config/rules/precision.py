"""Rules about precision, recipes, kernels and GEMM dimensions, and the automatic choice of kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megafp8.config import derived, dimensions, gemm_alignment, model_shapes, precision_map, topology
from megafp8.config.activations import is_plain_swiglu
from megafp8.config.expert_layers import is_mixture
from megafp8.config.features import changed_flag
from megafp8.config.layer_backends import requested_backend
from megafp8.config.rules.base import all_positive, flags_without_effect, has_shape, no_effect_without
from megafp8.config.rules.declared import HISTORY_SETTINGS
from megafp8.config.schema import RunConfig
from megafp8.config.settings import settings_by_name
from megafp8.recipes import registry

# Settings that have no effect in high precision, and without --fp8-format.
QUANTIZED_FLAGS = ("--fp8-amax-reduction VALUE", "--first-last-layers-bf16")
FP8_FLAGS = ("--fp8-recipe VALUE", "--no-fp8-wgrad", "--fp8-param-gather", "--fp8-dot-product-attention")
TILE_LENGTH = 128  # tokens and channels of a tile of the Triton kernels


def one_weight_format(config: RunConfig, world_size: int) -> Iterator[str]:
    """Weights are BF16, FP16 or, without either flag, FP32."""
    if config.precision.bf16 and config.precision.fp16:
        level = config.precision.fp8_lm_level
        yield (
            f"--fp16 with --fp8-lm-level {level}, which is for BF16: remove one of them"
            if level
            else "--bf16 and --fp16 are both given: keep one"
        )


def one_low_format(config: RunConfig, world_size: int) -> Iterator[str]:
    """The linears are in FP8 or in FP4, not in both."""
    precision = config.precision
    if precision.fp8_format is not None and precision.fp4_format is not None:
        yield f"--fp8-format {precision.fp8_format} and --fp4-format {precision.fp4_format} are both given: keep one"


def low_formats_are_not_with_fp16(config: RunConfig, world_size: int) -> Iterator[str]:
    """Recipes scale BF16 or FP32 tensors; the loss scaling of FP16 would scale gradients a second time."""
    precision = config.precision
    if precision.fp16 and (recipes := precision_map.used_recipes(precision)):
        fix = "remove --fp16" if precision.bf16 else "use --bf16 instead of --fp16"
        yield f"{precision_map.recipe_source(precision, recipes[0])} with --fp16: {fix}"


def low_format_settings_need_a_format(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of FP8 and FP4 have no effect without a format."""
    used = precision_map.used_recipes(config.precision)
    if config.precision.fp8_format is None:
        yield from flags_without_effect(config, FP8_FLAGS, "--fp8-format")
    for recipe in registry.recipes():
        if precision_map.format_of(config.precision, recipe.family) is None and recipe.name not in used:
            for flag in _changed_flags(config, recipe.setting_names):
                yield no_effect_without(flag, f"--{recipe.family}-format")
    if not used:
        yield from flags_without_effect(config, QUANTIZED_FLAGS, "--fp8-format")


def recipe_settings_need_their_recipe(config: RunConfig, world_size: int) -> Iterator[str]:
    """Options of a recipe have no effect under another. `declared.py` has margin and amax history."""
    precision = config.precision
    chosen = {"fp8": precision.fp8_recipe, "fp4": precision.fp4_recipe}
    used = precision_map.used_recipes(precision)
    for recipe in (recipe for recipe in registry.recipes() if recipe.name not in used):
        if precision_map.format_of(precision, recipe.family) is None:
            continue
        names = (name for name in recipe.setting_names if name not in HISTORY_SETTINGS)
        for flag in _changed_flags(config, names):
            yield (
                f"{flag} is an option of {recipe.flag}, not of {chosen[recipe.family]}: remove it, or change the recipe"
            )


def _changed_flags(config: RunConfig, names: Iterable[str]) -> Iterator[str]:
    """The flags of those precision settings that differ from their defaults."""
    return filter(None, (changed_flag(config, settings_by_name()[f"precision.{name}"]) for name in names))


def fp8_weights_need_sharded_optimizer(config: RunConfig, world_size: int) -> Iterator[str]:
    """FP8 weights need the distributed optimizer, which has the master weights."""
    if config.precision.fp8_param_gather and config.parallel.shards_optimizer is False:
        yield "--fp8-param-gather needs --use-distributed-optimizer, which keeps the high-precision weights"


def fp8_weights_need_masters(config: RunConfig, world_size: int) -> Iterator[str]:
    """FP8 weights are cast from FP32 master weights, which exist only with BF16 weights."""
    if config.precision.fp8_param_gather and derived.params_dtype(config.precision) == "fp32":
        yield "--fp8-param-gather needs --bf16: without it, the weights are FP32 and have no separate master weights"


def high_precision_validation_needs_weights(config: RunConfig, world_size: int) -> Iterator[str]:
    """A validation in high precision reads the weights, not their codes."""
    if config.training.eval_high_precision and config.precision.fp8_param_gather:
        yield "--eval-high-precision with --fp8-param-gather: the weights are there as FP8 codes only; remove one"


def low_formats_need_quantizing_layers(config: RunConfig, world_size: int) -> Iterator[str]:
    """megatron-core's local layers support neither FP8 nor FP4."""
    precision = config.precision
    backend = requested_backend(precision)
    if backend is not None and not backend.quantizes and (recipes := precision_map.used_recipes(precision)):
        yield (
            f"{precision_map.recipe_source(precision, recipes[0])} with --transformer-impl local: megatron-core's own "
            "layers do not quantize; use --transformer-impl auto"
        )


def high_precision_layers_fit_a_stage(config: RunConfig, world_size: int) -> Iterator[str]:
    """The layers in high precision at each end are all on the first or the last pipeline stage."""
    precision, pp = config.precision, config.parallel.pipeline_model_parallel_size
    if not precision.first_last_layers_bf16:
        counts = ("--num-layers-at-start-in-bf16 VALUE", "--num-layers-at-end-in-bf16 VALUE")
        yield from flags_without_effect(config, counts, "--first-last-layers-bf16")
        return
    if not all_positive(config.model.num_layers, pp):
        return
    assert config.model.num_layers is not None
    per_stage = config.model.num_layers // pp  # megatron-core's limit, also where stages are uneven
    for flag, count in (
        ("--num-layers-at-start-in-bf16", precision.num_layers_at_start_in_bf16),
        ("--num-layers-at-end-in-bf16", precision.num_layers_at_end_in_bf16),
    ):
        if count > per_stage:
            yield (
                f"{flag} {count} is more than the {config.model.num_layers} / {pp} = {per_stage} layers of a pipeline "
                f"stage: use at most {per_stage}"
            )


def gradient_reduction_has_one_format(config: RunConfig, world_size: int) -> Iterator[str]:
    """Gradients are reduced in FP32 or in BF16, not in both."""
    precision = config.precision
    if precision.grad_reduce_in_bf16 and precision.accumulate_allreduce_grads_in_fp32:
        yield "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 contradict each other: keep one"
    if precision.grad_reduce_in_bf16 and not precision.bf16:
        yield no_effect_without("--grad-reduce-in-bf16", "--bf16")


def loss_fusion_is_on_for_its_implementation(config: RunConfig, world_size: int) -> Iterator[str]:
    """--cross-entropy-fusion-impl selects a fused loss, which must be on and take the logits' dtype."""
    precision = config.precision
    if precision.cross_entropy_fusion_impl != "te":
        return
    flag = "--cross-entropy-fusion-impl te"
    if precision.cross_entropy_loss_fusion is False:
        yield no_effect_without(flag, "--cross-entropy-loss-fusion")
    elif precision.fp16:
        yield f"{flag} with --fp16: the kernel takes logits in BF16 or FP32; use --cross-entropy-fusion-impl native"


def split_rope_needs_whole_rotations(config: RunConfig, world_size: int) -> Iterator[str]:
    """The split-rope kernel rotates complete heads of the output of linear_qkv."""
    if config.precision.split_rope_fusion:
        yield from split_rope_problems(config)


def uses_split_rope_kernel(config: RunConfig) -> bool:
    """Whether Transformer Engine's layers split and rotate in one kernel: by default where that is possible."""
    requested = config.precision.split_rope_fusion
    return requested if requested is not None else not any(split_rope_problems(config))


def split_rope_problems(config: RunConfig) -> Iterator[str]:
    """Why --split-rope-fusion is not possible."""
    model, flag = config.model, "--split-rope-fusion"
    if model.position_embedding_type != "rope":
        yield no_effect_without(flag, "--position-embedding-type rope")
    if not config.precision.apply_rope_fusion:
        yield f"{flag} with --no-rope-fusion: remove one"
    if model.multi_latent_attention:
        yield f"{flag} does not support --multi-latent-attention, whose heads are rotated in a part"
    if model.qk_layernorm or model.qk_l2_norm or model.rotary_interleaved or model.rotary_percent != 1.0:
        yield (
            f"{flag} does not support --qk-layernorm, --qk-l2-norm, --rotary-interleaved or --rotary-percent below 1"
        )
    if model.no_rope_freq is not None:
        yield f"{flag} rotates in all layers, but --no-rope-freq {model.no_rope_freq} excludes some: remove one"
    if has_shape(config) and (size := dimensions.kv_channels(model)) & (size - 1):
        yield f"{flag} needs a power of two as the channels per head, not {size}"
    tp = config.parallel.tensor_model_parallel_size
    if has_shape(config) and (groups := dimensions.num_query_groups(model)) < tp:
        yield f"{flag} with {groups} query groups over {tp} tensor-parallel ranks: every rank needs at least one group"


def swiglu_fusion_has_what_it_fuses(config: RunConfig, world_size: int) -> Iterator[str]:
    """--swiglu-quantize-fusion needs the op fuser, SwiGLU, a recipe that it supports and complete tiles."""
    precision, flag = config.precision, "--swiglu-quantize-fusion"
    if not precision.swiglu_quantize_fusion:
        return
    if not uses_op_fuser(config):
        yield no_effect_without(flag, "--use-transformer-engine-op-fuser")
    if not is_plain_swiglu(config.model):
        yield no_effect_without(flag, "--swiglu")
    name = derived.quantization_recipe(precision)
    recipe = None if name is None else registry.get(name)
    if recipe is None or recipe.te_quantizer is None:
        yield no_effect_without(flag, f"--fp8-recipe {' or '.join(registry.with_fused_swiglu())}")
    elif not recipe.fuses_swiglu and name not in requested_triton_cast_recipes(config):
        yield no_effect_without(f"{flag} with {recipe.flag}", "--quantize-kernels triton")
    if is_plain_swiglu(config.model) and not swiglu_has_tiles(config):
        fc2 = model_shapes.gemm_dimensions(config)[-1]
        yield (
            f"{flag} needs multiples of {TILE_LENGTH} tokens and channels per rank, but SwiGLU's output is {fc2.rows} "
            f"x {fc2.in_features}: change --seq-length, --micro-batch-size or --ffn-hidden-size, or remove it"
        )


def op_fuser_has_its_activation(config: RunConfig, world_size: int) -> Iterator[str]:
    """Fused operations have the exact GELU as a gate, and no tanh approximation."""
    if config.precision.use_transformer_engine_op_fuser and config.model.geglu:
        yield (
            "--use-transformer-engine-op-fuser with --geglu: Transformer Engine has no fused operation with the tanh "
            "approximation of GELU; remove one"
        )


def residual_fusion_has_its_norm(config: RunConfig, world_size: int) -> Iterator[str]:
    """--residual-norm-fusion needs the op fuser, RMSNorm and the input of the norm from the forward pass."""
    flag = "--residual-norm-fusion"
    if not config.precision.residual_norm_fusion:
        return
    if not uses_op_fuser(config):
        yield no_effect_without(flag, "--use-transformer-engine-op-fuser")
    if config.model.normalization != "RMSNorm":
        yield no_effect_without(flag, "--normalization RMSNorm")
    if derived.recompute_granularity(config.training) is not None:
        yield f"{flag} does not support activation recomputation, which runs the MLP's forward pass twice: remove one"


def has_swiglu_quantization_kernel(config: RunConfig) -> bool:
    """Whether the Triton SwiGLU can quantize its output for the run's recipe."""
    name = derived.quantization_recipe(config.precision)
    return name in (*registry.with_fused_swiglu(), *triton_cast_recipes(config))


def swiglu_has_tiles(config: RunConfig) -> bool:
    """Whether the input of linear_fc2, the output of SwiGLU on a rank, consists of complete tiles."""
    if not has_gemm_dimensions(config):
        return True
    fc2 = model_shapes.gemm_dimensions(config)[-1]
    return fc2.rows % TILE_LENGTH == fc2.in_features % TILE_LENGTH == 0


def quantize_kernels_have_what_they_quantize(config: RunConfig, world_size: int) -> Iterator[str]:
    """--quantize-kernels triton needs a recipe with Triton casts, and complete tiles of tokens."""
    flag, recipes = "--quantize-kernels triton", precision_map.used_recipes(config.precision)
    if config.precision.quantize_kernels != "triton":
        return
    if not any(recipe in registry.with_triton_casts() for recipe in recipes):
        yield no_effect_without(flag, f"--fp8-recipe {' or '.join(registry.with_triton_casts())}")
    elif has_gemm_dimensions(config) and (tokens := model_shapes.rows_per_rank(config)) % TILE_LENGTH:
        yield (
            f"{flag} needs a multiple of {TILE_LENGTH} tokens per rank and microbatch, not {tokens}: change "
            "--seq-length or --micro-batch-size, or remove it"
        )


def triton_cast_recipes(config: RunConfig) -> tuple[str, ...]:
    """Recipes whose activations and gradients Triton casts: by default where that is possible and faster."""
    is_requested = config.precision.quantize_kernels is not None
    has_tiles = not has_gemm_dimensions(config) or model_shapes.rows_per_rank(config) % TILE_LENGTH == 0
    return requested_triton_cast_recipes(config) if is_requested or has_tiles else ()


def requested_triton_cast_recipes(config: RunConfig) -> tuple[str, ...]:
    """The same without regard to the tiles of tokens."""
    requested, known = config.precision.quantize_kernels, registry.with_triton_casts()
    if requested is not None:
        return known if requested == "triton" else ()
    if derived.uses_cuda_graph(config):
        return known
    # Without a CUDA graph, launching them takes more host time, which only some recipes save on the device.
    return tuple(name for name in known if registry.get(name).is_faster_with_kernels)


def triton_casts_need_amax_pass(config: RunConfig) -> bool:
    """Whether Triton casts any tensor with current scaling, which needs a first pass for the amax."""
    cast = triton_cast_recipes(config)
    return any(recipe.needs_amax_pass and recipe.name in cast for recipe in derived.used_recipes(config.precision))


def uses_op_fuser(config: RunConfig) -> bool:
    """Whether the MLP uses Transformer Engine's op fuser.

    By default it does where training was verified to be equivalent, and where nothing needs separate layers: precision
    maps, schedules, recomputation, tensor parallelism, sharded weights or reactions to non-finite operands.
    """
    model, precision, training = config.model, config.precision, config.training
    if precision.use_transformer_engine_op_fuser is not None:
        return precision.use_transformer_engine_op_fuser
    is_plain = is_plain_swiglu(model) and not model.add_bias_linear and precision.bf16 and not is_mixture(model)
    name = derived.quantization_recipe(precision)
    is_supported = name is None or registry.get(name).supports_op_fuser
    shows_amaxes = name is None or registry.get(name).is_stateful or name in triton_cast_recipes(config)
    needs_layers = (
        (precision_map.changes_mlps(model, precision) if model.num_layers is not None else precision.precision_map)
        or precision.fp8_schedule is not None or precision.first_last_layers_bf16
        or derived.recompute_granularity(training) is not None or config.parallel.shards_weights
        or config.parallel.tensor_model_parallel_size > 1
        or (training.on_nonfinite_activation != "warn" and not shows_amaxes)
    )  # fmt: skip
    return bool(is_plain and is_supported and not needs_layers)


def fuses_swiglu_quantization(config: RunConfig) -> bool:
    """Whether the op fuser uses the Triton SwiGLU that quantizes: by default where it is faster."""
    requested = config.precision.swiglu_quantize_fusion
    if requested is not None:
        return requested
    is_possible = is_plain_swiglu(config.model) and has_swiglu_quantization_kernel(config) and swiglu_has_tiles(config)
    return is_possible and uses_op_fuser(config)


def determinism_excludes_its_opposites(config: RunConfig, world_size: int) -> Iterator[str]:
    """Deterministic mode excludes kernels whose order of summation varies."""
    precision = config.precision
    if precision.deterministic_mode and precision.cross_entropy_loss_fusion:
        yield "--deterministic-mode with --cross-entropy-loss-fusion: the fused loss is not deterministic; remove one"


def gemm_dimensions_suit_the_recipe(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every dimension of every quantized GEMM is a multiple of the recipe's alignment."""
    if precision_map.is_quantized(config.precision) and has_gemm_dimensions(config):
        yield from gemm_alignment.gemm_alignment_problems(config)


def layout_independent_scales_need_complete_blocks(config: RunConfig, world_size: int) -> Iterator[str]:
    """Scales depend on the layout if a block or a scaled row is split over ranks."""
    precision, parallel = config.precision, config.parallel
    if precision.fp8_amax_reduction == "te" or not has_gemm_dimensions(config):
        return
    recipes = derived.used_recipes(precision)
    is_split = topology.model_parallel_size(config) > 1
    for recipe in (recipe for recipe in recipes if recipe.has_whole_dimensions and is_split):
        yield (
            f"--fp8-amax-reduction all: {precision_map.recipe_source(precision, recipe.name)} has one scale per row or "
            "column, and each rank has only a part of a row or column, so scales would depend on the layout; use "
            "--fp8-amax-reduction te"
        )
    blocks = {recipe.name: recipe.block_length for recipe in recipes if recipe.block_length}
    if not blocks:
        return
    name = max(blocks, key=blocks.__getitem__)
    length, source = blocks[name], precision_map.recipe_source(precision, name)
    parts: dict[str, float] = {}
    if parallel.tensor_model_parallel_size > 1:
        parts = {
            f"{linear.name}'s {what} per rank": size
            for linear in model_shapes.gemm_dimensions(config)
            for what, size in (("outputs", linear.out_features), ("inputs", linear.in_features))
        }
    if parallel.context_parallel_size > 1 or parallel.sequence_parallel:
        # A context-parallel rank has two pieces of the sequence, an early and a late one.
        pieces = 2 if parallel.context_parallel_size > 1 else 1
        parts["tokens in one piece per rank"] = model_shapes.rows_per_rank(config) / pieces
    for what, size in parts.items():
        if size % length:
            yield (
                f"--fp8-amax-reduction all: {source} has blocks of {length}, and {what} are {size:g}, so scales would "
                f"depend on the layout; use multiples of {length}, or --fp8-amax-reduction te"
            )


def has_gemm_dimensions(config: RunConfig) -> bool:
    """Whether the dimensions of every GEMM can be computed."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if not has_shape(config) or not all_positive(config.data.seq_length, config.training.micro_batch_size):
        return False
    assert model.num_attention_heads is not None
    sizes = (model.num_attention_heads, dimensions.num_query_groups(model), dimensions.ffn_hidden_size(model))
    divides = not any(size % tp for size in sizes)
    return divides and min(dimensions.kv_channels(model), dimensions.ffn_hidden_size(model)) >= 1
