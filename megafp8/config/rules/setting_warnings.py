"""Warnings about valid settings.

They report settings without effect in this run, which Megatron-LM's example scripts give; defaults of recipes that
differ from Transformer Engine's or from papers; values whose effect is rarely intended; and faster kernels that the
settings exclude.
"""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import derived, dimensions, iterations, precision_map, sharding
from megafp8.config.expert_layers import has_capacity, is_mixture
from megafp8.config.features import given_flags
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.rules.base import all_positive
from megafp8.config.rules.batch import schedule_flag, varying_schedule
from megafp8.config.rules.declared import unused_settings
from megafp8.config.rules.gradient_reduction import FLAG as FP8_REDUCTION
from megafp8.config.rules.gradient_reduction import has_unused_reduction
from megafp8.config.rules.guard import guard_warnings
from megafp8.config.rules.moe import PADDING
from megafp8.config.rules.optimizer import known_schedule
from megafp8.config.rules.precision import uses_op_fuser
from megafp8.config.schema import RunConfig
from megafp8.config.settings import settings_by_name, value_of, with_values
from megafp8.recipes import registry

DYNAMIC_LOSS_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def warnings(config: RunConfig, implementation: LayerBackend, world_size: int) -> list[str]:
    """All warnings about a configuration.

    Args:
        config: the settings.
        implementation: the layers in use.
        world_size: number of ranks.
    """
    return [
        *unused_settings(config),
        *_unused_setting_warnings(config, implementation),
        *_mixture_warnings(config, implementation),
        *_unused_reduction_warnings(config, world_size),
        *_recipe_warnings(config),
        *_instance_warnings(config),
        *warmup_warnings(config, world_size),
        *batch_schedule_warnings(config, world_size),
        *guard_warnings(config),
        *_op_fuser_warnings(config, implementation),
        *_cuda_graph_warnings(config, world_size),
    ]


def _cuda_graph_warnings(config: RunConfig, world_size: int) -> Iterator[str]:
    if derived.uses_cuda_graph(config) and world_size > 1:
        yield (
            f"--cuda-graph-impl {config.training.cuda_graph_impl}: slow ranks cannot be identified, because times "
            "within a graph cannot be measured"
        )


def _op_fuser_warnings(config: RunConfig, implementation: LayerBackend) -> Iterator[str]:
    if config.precision.use_transformer_engine_op_fuser and is_mixture(config.model):
        yield (
            "--use-transformer-engine-op-fuser fuses the MLPs of layers without experts; experts keep their own kernels"
        )
    if not implementation.has_fused_kernels or config.precision.use_transformer_engine_op_fuser is not None:
        return
    if not uses_op_fuser(config) and uses_op_fuser(with_values(config, {"precision.precision_map": ()})):
        yield (
            "the MLP uses Transformer Engine's layers instead of its fused operations (the op fuser), which support a "
            "single recipe: the precision map sets another recipe for a linear layer of the MLP"
        )


def _instance_warnings(config: RunConfig) -> Iterator[str]:
    instances = config.parallel.num_distributed_optimizer_instances
    if instances > 1 and config.parallel.num_replicas == 1:
        yield (
            f"--num-distributed-optimizer-instances {instances} has no effect without {sharding.FLAG}: optimizer "
            "states are sharded over all data-parallel ranks, which takes less memory and gives the same numbers"
        )


def _recipe_warnings(config: RunConfig) -> Iterator[str]:
    precision = config.precision
    recipe, used = f"--fp8-recipe {precision.fp8_recipe}", precision_map.used_recipes(precision)
    chosen = registry.get(precision.fp8_recipe)
    if used and derived.params_dtype(precision) == "fp32":
        yield (
            f"{precision_map.recipe_source(precision, used[0])} without --bf16: weights, activations and gradients are "
            "FP32 wherever they are not quantized; add --bf16 for BF16 with FP32 master weights"
        )
    if derived.is_stateful(precision) and precision.fp8_margin < 0:
        yield (
            f"--fp8-margin {precision.fp8_margin} multiplies scales by {2**-precision.fp8_margin}: values above "
            f"1/{2**-precision.fp8_margin} of the amax saturate; --fp8-margin 0 uses the full range of the format"
        )
    if precision.fp8_format == "hybrid" and chosen.default_format == "e4m3":
        yield f"--fp8-format hybrid quantizes gradients to E5M2; {recipe} usually uses E4M3: --fp8-format e4m3"
    options = [settings_by_name()[f"precision.{name}"] for name, _ in chosen.tested_options]
    if precision.fp8_format and options and all(value_of(config, each.name) == each.default for each in options):
        flags = " ".join(each.as_flag(value) for each, (_, value) in zip(options, chosen.tested_options, strict=True))
        yield (f"{recipe} has Megatron-LM's default options; --recipe {chosen.name} has the tested ones: {flags}")


def warmup_warnings(config: RunConfig, world_size: int) -> Iterator[str]:
    """A run that ends during its warm-up, as Megatron-LM's smoke tests do."""
    schedule, peak = known_schedule(config, world_size), config.optimizer.lr
    if schedule is None or peak is None:
        return
    length, batches = iterations.train_samples(config, world_size), iterations.batch_schedule(config, world_size)
    warmup, start = schedule.warmup, config.optimizer.lr_warmup_init
    if length <= warmup < schedule.decay:
        last = start + (peak - start) * batches.advance(iterations.train_iters(config, world_size) - 1) / warmup
        yield (
            f"the warmup of {batches.steps_until(warmup):g} steps is not shorter than the run of "
            f"{batches.steps_until(length):g} steps: the learning rate only reaches {last:.3g}, below --lr {peak:g}; "
            "lower --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction, or train longer"
        )


def batch_schedule_warnings(config: RunConfig, world_size: int) -> Iterator[str]:
    """Sizes of a schedule that start after the end of the run, and a schedule of the learning rate that is longer."""
    schedule, steps = varying_schedule(config, world_size), config.training.train_iters
    if schedule is None:
        return
    last = schedule.phases[-1]
    if steps is not None:
        yield (
            f"{schedule_flag(config)} with --train-iters {steps}: the run has {schedule.advance(steps)} samples; the "
            f"steps of --lr-decay-iters, --lr-warmup-iters and --train-iters count as {last.batch_size} samples each "
            "in the schedules of learning rate and weight decay, as in Megatron-LM"
        )
        return
    samples = config.training.train_samples
    if not all_positive(samples) or samples is None:
        return
    if last.start_sample >= samples:
        yield (
            f"{schedule_flag(config)}: the size {last.batch_size} starts at sample {last.start_sample}, which the run "
            f"of --train-samples {samples} does not reach"
        )


def _unused_reduction_warnings(config: RunConfig, world_size: int) -> Iterator[str]:
    """A level on one data-parallel rank."""
    if has_unused_reduction(config, world_size) and config.precision.fp8_lm_level is not None:
        yield (
            f"--fp8-lm-level {config.precision.fp8_lm_level} with one data-parallel rank: {FP8_REDUCTION} and its "
            "options have no effect, since no other rank has gradients of the same weights"
        )


def _mixture_warnings(config: RunConfig, implementation: LayerBackend) -> Iterator[str]:
    model = config.model
    if not is_mixture(model):
        return
    if model.moe_router_load_balancing_type == ("none",) and any(model.moe_aux_loss_coeff):
        numbers = " ".join(f"{each:g}" for each in model.moe_aux_loss_coeff)
        yield f"--moe-aux-loss-coeff {numbers} has no effect with --moe-router-load-balancing-type none"
    if model.moe_router_pre_softmax and model.moe_router_score_function == "sigmoid":
        yield "--moe-router-pre-softmax has no effect with --moe-router-score-function sigmoid"
    if model.moe_router_padding_for_quantization:
        yield from _router_padding_warnings(config, implementation)
    topk, groups = model.moe_router_topk, model.moe_router_group_topk
    if groups and topk % groups and topk > groups:
        count = topk // groups
        yield (
            f"--moe-router-topk {topk} with --moe-router-group-topk {groups}: a group is scored by its {count} best "
            f"expert{'s' if count > 1 else ''} ({topk} / {groups}, rounded down), as in megatron-core"
        )
    if not model.moe_router_enable_expert_bias or not has_capacity(model):
        return
    if model.moe_pad_expert_input_to_capacity:
        yield (
            "--moe-router-enable-expert-bias has no effect with --moe-pad-expert-input-to-capacity: megatron-core "
            "updates the bias from the tokens that experts multiply, which are as many for every expert"
        )
    else:
        yield (
            f"--moe-router-enable-expert-bias with --moe-expert-capacity-factor {model.moe_expert_capacity_factor:g}: "
            "megatron-core updates the bias from the tokens that the capacity leaves: an expert far above the capacity "
            "counts as one just at it"
        )


def _router_padding_warnings(config: RunConfig, implementation: LayerBackend) -> Iterator[str]:
    one_launch = "--moe-expert-kernels triton"
    if implementation.pads_expert_tokens:
        yield (
            f"{PADDING} has no effect with --transformer-impl {implementation}, whose experts pad their tokens with "
            "zeros"
        )
    elif config.parallel.moe_expert_kernels != "triton":
        return
    elif config.parallel.expert_model_parallel_size == 1:
        yield (
            f"{PADDING} has no effect with {one_launch} on one expert-parallel rank: there is no dispatcher, and the "
            "kernels leave rows between experts empty"
        )
    else:
        yield (
            f"{PADDING} only costs time with {one_launch}, whose kernels leave rows between experts empty: the "
            "dispatcher sends more tokens, which count for the scales of the experts' input"
        )


def _unused_setting_warnings(config: RunConfig, implementation: LayerBackend) -> Iterator[str]:
    parallel, data = config.parallel, config.data
    if config.optimizer.use_precision_aware_optimizer and not implementation.has_low_precision_optimizer:
        yield (
            "--use-precision-aware-optimizer is emulated: optimizer state has the numbers of its formats, and takes "
            "four bytes each"
        )
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield "--sequence-parallel has no effect with --tensor-model-parallel-size 1"
    if data.tokenizer_type != "TikTokenizer":
        for flag in given_flags(config, ("--tiktoken-pattern VALUE", "--tiktoken-num-special-tokens VALUE")).values():
            yield f"{flag} has no effect: it is for TikTokenizer, not {data.tokenizer_type}"
    fixed = config.optimizer.loss_scale
    if fixed is not None or not config.precision.fp16:
        reason = "only --fp16 has a dynamic loss scale" if fixed is None else f"--loss-scale {fixed:g} is fixed"
        for name in DYNAMIC_LOSS_SCALE:
            setting = settings_by_name()[f"optimizer.{name}"]
            value = value_of(config, setting.name)
            if value != setting.default:
                yield f"{setting.flags[0]} {value:g} has no effect: {reason}"
    model = config.model
    if data.reset_position_ids and model.position_embedding_type != "learned_absolute":
        yield (
            f"--reset-position-ids has no effect with --position-embedding-type {model.position_embedding_type}: "
            "attention depends on distances only, and --reset-attention-mask separates documents"
        )
    if data.reset_attention_mask and not data.eod_mask_loss:
        yield (
            "--reset-attention-mask without --eod-mask-loss: the first token of a document is still a label, of the "
            "end of the document before"
        )
    if model.attention_logit_softcapping is not None and not implementation.has_torch_attention:
        yield (
            f"--attention-logit-softcapping {model.attention_logit_softcapping:g}: Transformer Engine has none, so "
            "attention is computed by torch; its memory grows with the square of --seq-length"
        )
    if config.precision.fp8_dot_product_attention and config.precision.fp8_format is not None:
        yield (
            "--fp8-dot-product-attention may cost loss: with 32,768 tokens it was 1.5% and 3.6% higher in two seeds "
            "of a small model after 200 steps than with attention in BF16 (benchmarks/results/attention.md)"
        )
    has_te_ranks = parallel.context_parallel_size > 1 and not implementation.has_torch_attention
    if has_te_ranks and (exchange := dimensions.cp_exchange(config)) != parallel.cp_comm_type:
        yield (
            f"--cp-comm-type {parallel.cp_comm_type} with --reset-attention-mask: a ring would need padded documents; "
            f"{exchange} takes its place"
        )
    if parallel.cp_comm_type != "p2p" and implementation.has_torch_attention and parallel.context_parallel_size > 1:
        yield (
            f"--cp-comm-type {parallel.cp_comm_type} has no effect: the {implementation} layers always all-gather keys "
            "and values"
        )
