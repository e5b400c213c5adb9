"""Rules about multi-latent attention."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from megafp8.config import derived
from megafp8.config.rules.base import excluded, flags_without_effect, no_effect_without
from megafp8.config.schema import RunConfig

LATENT = "--multi-latent-attention"
EXCLUDED = MappingProxyType(
    {
        "--group-query-attention": (
            "every query head has its own key and value: remove one, or choose another --model-preset"
        ),
        "--position-embedding-type yarn": "it has its own YaRN: use --position-embedding-type rope",
        "--no-yarn-correction-range-round-to-int": "megatron-core always rounds: remove it",
        "--rotary-percent VALUE": "rotated channels are those of --qk-pos-emb-head-dim: remove it",
        "--softmax-scale VALUE": "its scale is 1 / sqrt(channels per head), times YaRN's: remove it",
        "--qk-layernorm-across-heads": "--qk-layernorm normalizes what all heads share: remove it",
        "--norm-placement VALUE": "not supported: use pre",
    }
)
NOT_SUPPORTED = (
    "--add-qkv-bias",
    "--qk-l2-norm",
    "--rotary-interleaved",
    "--use-rope-scaling",
    "--rotary-seq-len-interpolation-factor",
    "--rotary-base-local VALUE",
    "--no-rope-freq VALUE",
    "--softmax-type VALUE",
    "--parallel-residual",
)
EXCLUDED_LAYOUTS = MappingProxyType(
    {
        "--tp-comm-overlap": "the user buffers are for the linears of other attention; remove --tp-comm-overlap",
        "--fp8-dot-product-attention": "FP8 attention is not tested with value heads of another size; remove one",
    }
)


def values_need_latent_attention(config: RunConfig, world_size: int) -> Iterator[str]:
    """Values of other settings that are for multi-latent attention have no effect without it."""
    if config.model.multi_latent_attention:
        return
    # rope says nothing else than Megatron-LM's default
    yield from flags_without_effect(config, ("--rope-type yarn",), LATENT)
    if "mla_up_proj" in derived.recompute_modules(config.training):
        yield no_effect_without("--recompute-modules mla_up_proj", LATENT)


def latent_attention_excludes_other_attention(config: RunConfig, world_size: int) -> Iterator[str]:
    """Options of other kinds of attention, of their heads and of their rotary embedding."""
    if config.model.multi_latent_attention:
        yield from excluded(config, LATENT, EXCLUDED | dict.fromkeys(NOT_SUPPORTED, "not supported: remove it"))


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
    parallel = config.parallel
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield (
            f"{LATENT} with --tensor-model-parallel-size {parallel.tensor_model_parallel_size}: "
            "without --sequence-parallel megatron-core does not sum the gradient of the rotated keys; add it"
        )
    yield from excluded(config, LATENT, EXCLUDED_LAYOUTS)
