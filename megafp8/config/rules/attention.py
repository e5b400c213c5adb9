"""Rules about attention, position embeddings, and documents in a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from megafp8.config import attention_layers, latent_attention
from megafp8.config.features import given_flags
from megafp8.config.rules.base import all_positive, no_effect_without, not_supported
from megafp8.config.schema import ModelConfig, RunConfig
from megafp8.errors import ConfigError

YARN_SETTINGS = (
    "rotary_scaling_factor",
    "mscale",
    "mscale_all_dim",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_correction_range_round_to_int",
)


def windows_can_be_read(config: RunConfig, world_size: int) -> Iterator[str]:
    """--window-size has two numbers, looks back only, and its pattern is for all layers."""
    model = config.model
    if model.window_size is None:
        return
    try:
        left, right = attention_layers.window_size(model) or (0, 0)
        if all_positive(model.num_layers):
            attention_layers.windowed_layers(model)
    except ConfigError as error:
        yield from error.problems
        return
    if left < -1 or right != 0:
        yield (
            f"--window-size {model.window_size}: attention is causal, so give LEFT,0 with LEFT of at least 0, or -1 "
            "for all tokens before"
        )


def layers_without_rope_can_be_read(config: RunConfig, world_size: int) -> Iterator[str]:
    """--no-rope-freq has a pattern for all layers, and needs rotary embeddings."""
    model = config.model
    if model.no_rope_freq is None:
        return
    if model.position_embedding_type not in ("rope", "yarn"):
        yield no_effect_without(f"--no-rope-freq {model.no_rope_freq}", "--position-embedding-type rope")
    if all_positive(model.num_layers):
        try:
            attention_layers.layers_without_rope(model)
        except ConfigError as error:
            yield from error.problems


def learned_positions_are_wanted_once(config: RunConfig, world_size: int) -> Iterator[str]:
    """--no-position-embedding contradicts learned position embeddings, and says nothing about others."""
    model = config.model
    if not model.add_position_embedding and model.position_embedding_type == "learned_absolute":
        yield (
            "--no-position-embedding with --position-embedding-type learned_absolute, which is the default: give "
            "--position-embedding-type rope, or none"
        )


def yarn_has_its_settings(config: RunConfig, world_size: int) -> Iterator[str]:
    """YaRN needs the original context length, and its settings need YaRN."""
    model, default = config.model, ModelConfig()
    if not latent_attention.uses_yarn(model):
        needs = "--rope-type yarn" if model.multi_latent_attention else "--position-embedding-type yarn"
        for name in YARN_SETTINGS:
            if getattr(model, name) != getattr(default, name):
                yield no_effect_without("--" + name.replace("_", "-"), needs)
        return
    if model.yarn_original_max_position_embeddings is None and not model.multi_latent_attention:
        yield (
            "--position-embedding-type yarn needs the context length before the extension: give "
            "--yarn-original-max-position-embeddings"
        )
    if model.yarn_beta_fast <= model.yarn_beta_slow:
        yield (
            f"--yarn-beta-fast {model.yarn_beta_fast:g} must be above --yarn-beta-slow {model.yarn_beta_slow:g}: it "
            "belongs to the higher frequencies"
        )
    unsupported = (
        "--rotary-percent VALUE", "--rotary-interleaved", "--use-rope-scaling", "--rotary-seq-len-interpolation-factor",
    )  # fmt: skip
    for flag in given_flags(config, unsupported).values():
        yield f"YaRN: megatron-core's does not support {flag}; remove one"


def queries_have_one_norm(config: RunConfig, world_size: int) -> Iterator[str]:
    """Queries and keys are normalized in one way."""
    if config.model.qk_layernorm and config.model.qk_l2_norm:
        yield "--qk-layernorm and --qk-l2-norm are both given: keep one"


def documents_fit_the_attention(config: RunConfig, world_size: int) -> Iterator[str]:
    """--reset-attention-mask: documents lie at other places in every microbatch."""
    if config.data.reset_attention_mask and config.precision.fp8_dot_product_attention:
        yield (
            "--reset-attention-mask with --fp8-dot-product-attention: FP8 attention has no borders of documents; "
            "remove one"
        )


BOUNDED = "the norms bound the logits, and undo what a factor does to their weights"
QK_NORMS = MappingProxyType({"--qk-layernorm": BOUNDED, "--qk-l2-norm": BOUNDED})
QK_CLIP_EXCLUDES = MappingProxyType(
    {
        "--use-precision-aware-optimizer": "the master weights are within the state of Adam",
        "--mtp-num-layers": "its layers have not been tried",
    }
)


def clipped_logits_follow_the_weights(config: RunConfig, world_size: int) -> Iterator[str]:
    """Features with which --qk-clip cannot shrink logits, or not the master weights."""
    if config.optimizer.qk_clip:
        # Norms of multi-latent attention come before the projections that are clipped.
        norms = {} if latent_attention.is_latent(config.model) else QK_NORMS
        yield from not_supported(config, "--qk-clip", {**norms, **QK_CLIP_EXCLUDES})


def capped_scores_are_not_fp8(config: RunConfig, world_size: int) -> Iterator[str]:
    """FP8 attention has a plain softmax."""
    model = config.model
    others = {
        f"--softmax-type {model.softmax_type}": model.softmax_type != "vanilla",
        f"--attention-logit-softcapping {model.attention_logit_softcapping}": (
            model.attention_logit_softcapping is not None
        ),
    }
    for flag, given in others.items():
        if given and config.precision.fp8_dot_product_attention:
            yield f"{flag} with --fp8-dot-product-attention: FP8 attention has a plain softmax; remove one"
