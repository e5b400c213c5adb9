"""Rules about multi-latent attention."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config import derived
from megafp8.config.rules.base import flags_without_effect
from megafp8.config.schema import ModelConfig, RunConfig


def values_need_latent_attention(config: RunConfig, world_size: int) -> Iterator[str]:
    """Values of other settings that are for multi-latent attention have no effect without it."""
    if config.model.multi_latent_attention:
        return
    given = {
        "--rope-type yarn": config.model.rope_type == "yarn",  # rope says nothing else than Megatron-LM's default
        "--recompute-modules mla_up_proj": "mla_up_proj" in derived.recompute_modules(config.training),
    }
    yield from flags_without_effect(given, "--multi-latent-attention")


def latent_attention_excludes_other_attention(config: RunConfig, world_size: int) -> Iterator[str]:
    """Options of other kinds of attention, of their heads and of their rotary embedding."""
    model, default = config.model, ModelConfig()
    if not model.multi_latent_attention:
        return
    excluded = {
        "--group-query-attention": (
            model.group_query_attention,
            "every query head has its own key and value: remove one, or choose another --model-preset",
        ),
        "--position-embedding-type yarn": (
            model.position_embedding_type == "yarn", "it has its own YaRN: use --position-embedding-type rope"
        ),
        "--no-yarn-correction-range-round-to-int": (
            not model.yarn_correction_range_round_to_int, "megatron-core always rounds: remove it"
        ),
        f"--rotary-percent {model.rotary_percent:g}": (
            model.rotary_percent != 1, "rotated channels are those of --qk-pos-emb-head-dim: remove it"
        ),
        f"--softmax-scale {model.softmax_scale}": (
            model.softmax_scale is not None, "its scale is 1 / sqrt(channels per head), times YaRN's: remove it"
        ),
        "--qk-layernorm-across-heads": (
            model.qk_layernorm_across_heads, "--qk-layernorm normalizes what all heads share: remove it"
        ),
        f"--norm-placement {model.norm_placement}": (model.norm_placement != "pre", "not supported: use pre"),
    }  # fmt: skip
    not_supported = {
        "--add-qkv-bias": model.add_qkv_bias,
        "--qk-l2-norm": model.qk_l2_norm,
        "--rotary-interleaved": model.rotary_interleaved,
        "--use-rope-scaling": model.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor is not None,
        f"--rotary-base-local {model.rotary_base_local}": model.rotary_base_local is not None,
        f"--no-rope-freq {model.no_rope_freq}": model.no_rope_freq is not None,
        f"--softmax-type {model.softmax_type}": model.softmax_type != default.softmax_type,
        "--parallel-residual": model.parallel_residual,
    }
    for flag, given in not_supported.items():
        excluded[flag] = (given, "not supported: remove it")
    for flag, (given, reason) in excluded.items():
        if given:
            yield f"--multi-latent-attention with {flag}: {reason}"


def latent_heads_rotate_pairs(config: RunConfig, world_size: int) -> Iterator[str]:
    """Rotary embeddings rotate pairs of channels."""
    model = config.model
    if model.multi_latent_attention and model.qk_pos_emb_head_dim % 2:
        yield (
            f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim}: rotary embedding needs an even number; use "
            f"{model.qk_pos_emb_head_dim + 1}"
        )


def latent_attention_fits_the_layout(config: RunConfig, world_size: int) -> Iterator[str]:
    """Tensor-parallel ranks share the rotated channels of keys, whose gradient only sequence parallelism sums."""
    if not config.model.multi_latent_attention:
        return
    parallel, precision = config.parallel, config.precision
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield (
            f"--multi-latent-attention with --tensor-model-parallel-size {parallel.tensor_model_parallel_size}: "
            "without --sequence-parallel megatron-core does not sum the gradient of the rotated keys; add it"
        )
    if parallel.tp_comm_overlap:
        yield (
            "--multi-latent-attention with --tp-comm-overlap: the user buffers are for the linears of other attention; "
            "remove --tp-comm-overlap"
        )
    if parallel.use_torch_fsdp2:
        yield "--multi-latent-attention with --use-torch-fsdp2: not tested; use --use-distributed-optimizer"
    if precision.fp8_dot_product_attention:
        yield (
            "--multi-latent-attention with --fp8-dot-product-attention: FP8 attention is not tested with value heads "
            "of another size; remove one"
        )
    if config.data.reset_attention_mask:
        yield (
            "--multi-latent-attention with --reset-attention-mask: megatron-core's borders of documents need another "
            "layout of its tensors; remove one"
        )
