"""Number formats: what goes together, and dimensions that the recipe can take."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import derived, model_shapes, precision_map
from megafp8.config.rules.base import Rule, has_shape, positive, without
from megafp8.config.schema import RunConfig
from megafp8.config.settings import settings_by_name, value_of
from megafp8.recipes import registry

# Settings without an effect in a run in high precision, in other than the named formats, or under another recipe.
QUANTIZED_SETTINGS = ("fp8_amax_reduction", "first_last_layers_bf16")
FP8_SETTINGS = ("fp8_recipe", "fp8_wgrad", "fp8_param_gather", "fp8_dot_product_attention")
TILE_LENGTH = 128  # of the kernels' tiles, tokens and channels


def one_weight_format(config: RunConfig, world_size: int) -> Iterator[str]:
    """Weights are BF16, FP16 or, with neither flag, FP32."""
    if config.precision.bf16 and config.precision.fp16:
        yield "--bf16 and --fp16 are both given: keep one"


def one_low_format(config: RunConfig, world_size: int) -> Iterator[str]:
    """The linears are in FP8 or in FP4."""
    precision = config.precision
    if precision.fp8_format is not None and precision.fp4_format is not None:
        yield f"--fp8-format {precision.fp8_format} and --fp4-format {precision.fp4_format} are both given: keep one"


def low_formats_are_not_with_fp16(config: RunConfig, world_size: int) -> Iterator[str]:
    """The scales of recipes are for BF16 or FP32 weights; FP16's loss scale would be a second one."""
    precision = config.precision
    if precision.fp16 and (recipes := precision_map.used_recipes(precision)):
        yield f"{precision_map.asked_by(precision, recipes[0])} with --fp16: use --bf16 instead of --fp16"


def low_format_settings_need_a_format(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of FP8 and FP4 without their format would leave the run in high precision unnoticed."""
    used = precision_map.used_recipes(config.precision)
    if config.precision.fp8_format is None:
        for name in FP8_SETTINGS:
            yield from (without(flag, "--fp8-format") for flag in given_flags(config, name))
    for recipe in registry.recipes():
        if precision_map.format_of(config.precision, recipe.family) is None and recipe.name not in used:
            for name in recipe.setting_names:
                yield from (without(flag, f"--{recipe.family}-format") for flag in given_flags(config, name))
    if not used:
        for name in QUANTIZED_SETTINGS:
            yield from (without(flag, "--fp8-format") for flag in given_flags(config, name))


def recipe_settings_need_their_recipe(config: RunConfig, world_size: int) -> Iterator[str]:
    """Margin and amax history belong to delayed scaling, the choice of scales to tensorwise or blockwise."""
    chosen = config.precision.fp8_recipe
    if config.precision.fp8_format is None:
        return
    used = precision_map.used_recipes(config.precision)
    for recipe in registry.recipes("fp8"):
        for flag in (flag for name in recipe.setting_names for flag in given_flags(config, name)):
            if recipe.name not in used:
                yield f"{flag} belongs to {recipe.flag}, not {chosen}: remove it, or change the recipe"


def given_flags(config: RunConfig, name: str) -> Iterator[str]:
    """The flag that gave a precision setting a value other than its default, if one did."""
    setting = settings_by_name()[f"precision.{name}"]
    value = value_of(config, setting.name)
    if value != setting.default:
        flag = (setting.off if value is False and setting.off else setting.flags)[0]
        yield flag if isinstance(value, bool) else f"{flag} {value}"


def fp8_weights_need_sharded_optimizer(config: RunConfig, world_size: int) -> Iterator[str]:
    """FP8 compute weights have no master weights of their own; the distributed optimizer keeps those."""
    if config.precision.fp8_param_gather and not config.parallel.use_distributed_optimizer:
        yield "--fp8-param-gather needs --use-distributed-optimizer, which keeps the high-precision weights"


def fp8_weights_need_masters(config: RunConfig, world_size: int) -> Iterator[str]:
    """FP8 compute weights are made of FP32 master weights, which only BF16 weights have beside them."""
    if config.precision.fp8_param_gather and derived.params_dtype(config.precision) == "fp32":
        yield "--fp8-param-gather needs --bf16: FP32 weights are their own master weights and stay as they are"


def low_formats_need_quantizing_layers(config: RunConfig, world_size: int) -> Iterator[str]:
    """megatron-core's own layers know no FP8 and no FP4."""
    precision = config.precision
    if precision.transformer_impl == "local" and (recipes := precision_map.used_recipes(precision)):
        yield (
            f"{precision_map.asked_by(precision, recipes[0])} with --transformer-impl local: megatron-core's own "
            "layers do not quantize; use --transformer-impl auto"
        )


def high_precision_layers_fit_a_stage(config: RunConfig, world_size: int) -> Iterator[str]:
    """The layers kept in high precision at each end all lie on the first or last stage."""
    precision, pp = config.precision, config.parallel.pipeline_model_parallel_size
    counts = {
        "--num-layers-at-start-in-bf16": precision.num_layers_at_start_in_bf16,
        "--num-layers-at-end-in-bf16": precision.num_layers_at_end_in_bf16,
    }
    if not precision.first_last_layers_bf16:
        for flag, count in counts.items():
            if count != 1:
                yield without(f"{flag} {count}", "--first-last-layers-bf16")
        return
    if not positive(config.model.num_layers, pp):
        return
    per_stage = derived.layers_per_pipeline_rank(config)
    for flag, count in counts.items():
        if count > per_stage:
            yield (
                f"{flag} {count} is more than the {config.model.num_layers} / {pp} = {per_stage} layers of a pipeline "
                f"stage: use at most {per_stage}"
            )


def gradient_reduction_has_one_format(config: RunConfig, world_size: int) -> Iterator[str]:
    """Gradients are reduced in FP32 or in BF16."""
    precision = config.precision
    if precision.grad_reduce_in_bf16 and precision.accumulate_allreduce_grads_in_fp32:
        yield "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 contradict each other: keep one"
    if precision.grad_reduce_in_bf16 and not precision.bf16:
        yield without("--grad-reduce-in-bf16", "--bf16")


def loss_fusion_is_on_for_its_implementation(config: RunConfig, world_size: int) -> Iterator[str]:
    """--cross-entropy-fusion-impl chooses among fused losses."""
    precision = config.precision
    if precision.cross_entropy_fusion_impl != "native" and not precision.cross_entropy_loss_fusion:
        flag = f"--cross-entropy-fusion-impl {precision.cross_entropy_fusion_impl}"
        yield without(flag, "--cross-entropy-loss-fusion")


def split_rope_needs_whole_rotations(config: RunConfig, world_size: int) -> Iterator[str]:
    """The kernel rotates all of a head, as it comes from the linear."""
    if config.precision.split_rope_fusion:
        yield from split_rope_obstacles(config)


def rotates_in_one_kernel(config: RunConfig) -> bool:
    """Whether Transformer Engine's layers split and rotate in one kernel: as asked, or else where they can."""
    asked = config.precision.split_rope_fusion
    return asked if asked is not None else not any(split_rope_obstacles(config))


def split_rope_obstacles(config: RunConfig) -> Iterator[str]:
    """What stands against --split-rope-fusion."""
    model, flag = config.model, "--split-rope-fusion"
    if model.position_embedding_type != "rope":
        yield without(flag, "--position-embedding-type rope")
    if not config.precision.apply_rope_fusion:
        yield f"{flag} with --no-rope-fusion: remove one"
    if model.qk_layernorm or model.rotary_interleaved or model.rotary_percent != 1.0:
        yield f"{flag} is for heads rotated whole: not with --qk-layernorm, --rotary-interleaved or --rotary-percent"
    if has_shape(config) and (size := derived.kv_channels(model)) & (size - 1):
        yield f"{flag} is for heads whose size is a power of two, not {size}"
    groups, tp = derived.num_query_groups(model) if has_shape(config) else 0, config.parallel.tensor_model_parallel_size
    if 0 < groups < tp:
        yield f"{flag} with {groups} query groups over {tp} tensor-parallel ranks: every rank needs a group"


def swiglu_fusion_has_what_it_fuses(config: RunConfig, world_size: int) -> Iterator[str]:
    """It is part of Transformer Engine's fused operations, and knows the scales of some recipes."""
    precision, flag = config.precision, "--swiglu-quantize-fusion"
    if not precision.swiglu_quantize_fusion:
        return
    if not fuses_operations(config):
        yield without(flag, "--use-transformer-engine-op-fuser")
    if not config.model.swiglu:
        yield without(flag, "--swiglu")
    name = derived.quantization_recipe(precision)
    recipe = None if name is None else registry.get(name)
    if recipe is None or recipe.te_quantizer is None:
        yield without(flag, f"--fp8-recipe {' or '.join(recipes_that_fuse_swiglu())}")
    elif not recipe.fuses_swiglu and name not in recipes_wanted_of_our_kernels(config):
        yield without(f"{flag} with {recipe.flag}", "--quantize-kernels triton")
    if config.model.swiglu and not swiglu_has_tiles(config):
        fc2 = model_shapes.gemm_dimensions(config)[-1]
        yield (
            f"{flag} takes {TILE_LENGTH} tokens and channels at a time, and a rank's SwiGLU makes {fc2.rows} x "
            f"{fc2.in_features}: choose --seq-length, --micro-batch-size and --ffn-hidden-size for multiples, or "
            "remove it"
        )


def residual_fusion_has_its_norm(config: RunConfig, world_size: int) -> Iterator[str]:
    """It is part of Transformer Engine's fused operations, which know it of RMSNorm and keep the norm's input."""
    flag = "--residual-norm-fusion"
    if not config.precision.residual_norm_fusion:
        return
    if not fuses_operations(config):
        yield without(flag, "--use-transformer-engine-op-fuser")
    if config.model.normalization != "RMSNorm":
        yield without(flag, "--normalization RMSNorm")
    if derived.recompute_granularity(config.training) is not None:
        yield f"{flag} takes the MLP's input from its forward pass, and recomputation runs that twice: remove one"


def recipes_that_fuse_swiglu() -> tuple[str, ...]:
    """Names of the recipes with a SwiGLU that quantizes, whoever casts the other operands."""
    return tuple(recipe.name for recipe in registry.recipes() if recipe.fuses_swiglu)


def has_quantizing_swiglu(config: RunConfig) -> bool:
    """Whether there is a SwiGLU that quantizes by the recipe's rule."""
    name = derived.quantization_recipe(config.precision)
    return name in (*recipes_that_fuse_swiglu(), *recipes_of_our_kernels(config))


def swiglu_has_tiles(config: RunConfig) -> bool:
    """Whether the kernels take what a rank's SwiGLU makes, linear_fc2's input: they know whole tiles only."""
    if not has_gemms(config):
        return True
    fc2 = model_shapes.gemm_dimensions(config)[-1]
    return fc2.rows % TILE_LENGTH == fc2.in_features % TILE_LENGTH == 0


def quantize_kernels_have_what_they_quantize(config: RunConfig, world_size: int) -> Iterator[str]:
    """Only some recipes have kernels to choose between; ours take 128 tokens at a time."""
    flag, recipes = "--quantize-kernels triton", precision_map.used_recipes(config.precision)
    if config.precision.quantize_kernels != "triton":
        return
    if not any(recipe in registry.with_triton_casts() for recipe in recipes):
        yield without(flag, f"--fp8-recipe {' or '.join(registry.with_triton_casts())}")
    elif has_gemms(config) and (tokens := model_shapes.rows_per_rank(config)) % TILE_LENGTH:
        yield (
            f"{flag} takes {TILE_LENGTH} tokens at a time, and a rank quantizes {tokens} of a microbatch: choose "
            "--seq-length and --micro-batch-size for a multiple, or remove it"
        )


def recipes_of_our_kernels(config: RunConfig) -> tuple[str, ...]:
    """Recipes whose activations and gradients our kernels quantize: as asked, or else where they can and are faster."""
    is_asked = config.precision.quantize_kernels is not None
    has_tiles = not has_gemms(config) or model_shapes.rows_per_rank(config) % TILE_LENGTH == 0
    return recipes_wanted_of_our_kernels(config) if is_asked or has_tiles else ()


def recipes_wanted_of_our_kernels(config: RunConfig) -> tuple[str, ...]:
    """The same, whether a rank's tokens make whole tiles or not."""
    asked, known = config.precision.quantize_kernels, registry.with_triton_casts()
    if asked is not None:
        return known if asked == "triton" else ()
    if derived.has_step_graph(config):
        return known
    # Launched one by one the kernels take more of the host's time, which not every recipe's savings make up for.
    return tuple(name for name in known if registry.get(name).is_faster_with_kernels)


def casts_by_amax(config: RunConfig) -> bool:
    """Whether our kernels quantize anything by its own amax, which then is a pass of its own."""
    cast = recipes_of_our_kernels(config)
    return any(recipe.needs_amax_pass and recipe.name in cast for recipe in derived.used_recipes(config.precision))


def fuses_operations(config: RunConfig) -> bool:
    """Whether Transformer Engine's layers have fused operations for the MLP: as asked, or else where that was seen to
    train as without, and looks, maps and schedules work as without."""
    asked = config.precision.use_transformer_engine_op_fuser
    if asked is not None:
        return asked
    model, precision = config.model, config.precision
    is_plain = model.swiglu and not model.add_bias_linear and precision.bf16
    name = derived.quantization_recipe(precision)
    is_known = name is None or registry.get(name).supports_op_fuser
    is_split = derived.model_parallel_size(config) > 1
    has_layers = model.num_layers is not None
    is_mapped = precision_map.changes_mlps(model, precision) if has_layers else precision.precision_map
    is_apart = (
        is_mapped or precision.fp8_schedule is not None or precision.first_last_layers_bf16
        or config.logging.fp8_log_interval is not None or derived.recompute_granularity(config.training) is not None
    )  # fmt: skip
    return bool(is_plain and is_known and not is_split and not is_apart)


def quantizes_in_swiglu(config: RunConfig) -> bool:
    """Whether fused operations have our SwiGLU: as asked, or else where it is faster."""
    asked = config.precision.swiglu_quantize_fusion
    can = config.model.swiglu and has_quantizing_swiglu(config) and swiglu_has_tiles(config)
    return asked if asked is not None else can and fuses_operations(config)


def determinism_excludes_its_opposites(config: RunConfig, world_size: int) -> Iterator[str]:
    """Kernels whose sums depend on timing are out in deterministic mode."""
    precision = config.precision
    if precision.deterministic_mode and precision.cross_entropy_loss_fusion:
        yield "--deterministic-mode with --cross-entropy-loss-fusion: the fused loss is not deterministic; remove one"


def gemm_dimensions_suit_the_recipe(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every dimension of every quantized GEMM is a multiple of what the recipe needs."""
    if precision_map.is_quantized(config.precision) and has_gemms(config):
        yield from model_shapes.misfits(config)


def layout_free_scales_need_whole_blocks(config: RunConfig, world_size: int) -> Iterator[str]:
    """Where a rank's part ends within a block, the block's scale depends on the layout."""
    precision, parallel = config.precision, config.parallel
    if precision.fp8_amax_reduction == "te" or not has_gemms(config):
        return
    recipes = derived.used_recipes(precision)
    is_split = derived.model_parallel_size(config) > 1
    for recipe in (recipe for recipe in recipes if recipe.has_whole_dimensions and is_split):
        yield (
            f"--fp8-amax-reduction all: {precision_map.asked_by(precision, recipe.name)} has scales of whole rows and "
            "columns, of which each rank has a part, so that scales depend on the layout; give --fp8-amax-reduction te"
        )
    blocks = {recipe.name: recipe.block_length for recipe in recipes if recipe.block_length}
    if not blocks:
        return
    name = max(blocks, key=blocks.__getitem__)
    length, asked = blocks[name], precision_map.asked_by(precision, name)
    parts = {}
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
                f"--fp8-amax-reduction all: {asked} has blocks of {length}, and {what} are {size:g}, so that scales "
                "would depend on the layout; choose multiples, or give "
                "--fp8-amax-reduction te"
            )


def has_gemms(config: RunConfig) -> bool:
    """Whether the settings give every GEMM its dimensions."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if not has_shape(config) or not positive(config.data.seq_length, config.training.micro_batch_size):
        return False
    assert model.num_attention_heads is not None
    sizes = (model.num_attention_heads, derived.num_query_groups(model), derived.ffn_hidden_size(model))
    divides = not any(size % tp for size in sizes)
    return divides and min(derived.kv_channels(model), derived.ffn_hidden_size(model)) >= 1


RULES: tuple[Rule, ...] = (
    one_weight_format,
    one_low_format,
    low_formats_are_not_with_fp16,
    low_format_settings_need_a_format,
    recipe_settings_need_their_recipe,
    fp8_weights_need_sharded_optimizer,
    fp8_weights_need_masters,
    low_formats_need_quantizing_layers,
    high_precision_layers_fit_a_stage,
    gradient_reduction_has_one_format,
    loss_fusion_is_on_for_its_implementation,
    split_rope_needs_whole_rotations,
    swiglu_fusion_has_what_it_fuses,
    residual_fusion_has_its_norm,
    quantize_kernels_have_what_they_quantize,
    determinism_excludes_its_opposites,
    gemm_dimensions_suit_the_recipe,
    layout_free_scales_need_whole_blocks,
)
