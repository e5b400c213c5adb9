"""Fields of megatron-core's `TransformerConfig` for attention and position embeddings."""

from __future__ import annotations

from typing import Any

from megafp8.config import attention_layers
from megafp8.config.schema import ModelConfig


def attention_fields(model: ModelConfig) -> dict[str, Any]:
    """Fields for windows, softmax, query and key norms, and layers without rotary embedding."""
    windowed, without_rope = attention_layers.windowed_layers(model), attention_layers.layers_without_rope(model)
    has_pattern = any(windowed) and not all(windowed)
    return {
        "window_size": attention_layers.window_size(model) if any(windowed) else None,
        "window_attn_skip_freq": [int(each) for each in windowed] if has_pattern else None,
        "softmax_type": model.softmax_type,
        # With it megatron-core sums the gradients of these norms over the tensor-parallel ranks, which is wrong for a
        # weight that they share (`models/query_key_norm.py`). It reads the field for nothing else.
        "qk_layernorm": model.qk_layernorm and not model.qk_layernorm_across_heads,
        "qk_l2_norm": model.qk_l2_norm,
        "no_rope_freq": [int(each) for each in without_rope] or None,
        "rotary_interleaved": model.rotary_interleaved,
    }


def yarn_attributes(model: ModelConfig) -> dict[str, Any]:
    """Attributes of a `TransformerConfig` that megatron-core reads for YaRN, although it declares no such fields."""
    if model.position_embedding_type != "yarn":
        return {}
    return {
        "yarn_rotary_scaling_factor": model.rotary_scaling_factor,
        "yarn_original_max_position_embeddings": model.yarn_original_max_position_embeddings,
        "yarn_beta_fast": model.yarn_beta_fast,
        "yarn_beta_slow": model.yarn_beta_slow,
        "yarn_mscale": model.mscale,
        "yarn_mscale_all_dim": model.mscale_all_dim,
        "yarn_correction_range_round_to_int": model.yarn_correction_range_round_to_int,
    }
