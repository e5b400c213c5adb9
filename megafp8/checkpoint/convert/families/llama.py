"""Llama, and dense families with its layers: RMSNorm, rotary positions, a gated SiLU and no biases, or few.

transformers and megatron-core (without --rotary-interleaved) both rotate the two halves of a head's channels, so query
and key weights need no permutation.
"""

from __future__ import annotations

from dataclasses import replace

from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import (
    Field,
    Fixed,
    Heads,
    LayersWithoutRope,
    Rotary,
    SameBiases,
    SameDropout,
    Value,
    Window,
    shape_fields,
)
from megafp8.checkpoint.convert.tensor_mapping import FusedQKV

ATTENTION, MLP = "decoder.layers.{}.self_attention.", "decoder.layers.{}.mlp."
LAYER = "model.layers.{}."

NAMES = {
    "embedding.word_embeddings": ("model.embed_tokens",),
    f"{ATTENTION}linear_qkv.layer_norm": (f"{LAYER}input_layernorm",),
    f"{ATTENTION}linear_qkv": tuple(f"{LAYER}self_attn.{each}_proj" for each in "qkv"),
    f"{ATTENTION}linear_proj": (f"{LAYER}self_attn.o_proj",),
    f"{MLP}linear_fc1.layer_norm": (f"{LAYER}post_attention_layernorm",),
    f"{MLP}linear_fc1": (f"{LAYER}mlp.gate_proj", f"{LAYER}mlp.up_proj"),
    f"{MLP}linear_fc2": (f"{LAYER}mlp.down_proj",),
    "decoder.final_layernorm": ("model.norm",),
    "output_layer": ("lm_head",),
}
QK_NORM_NAMES = {
    f"{ATTENTION}q_layernorm": (f"{LAYER}self_attn.q_norm",),
    f"{ATTENTION}k_layernorm": (f"{LAYER}self_attn.k_norm",),
}
SETTINGS = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False}
NO_ATTENTION_BIAS = Fixed("attention_bias", (False,))


def common_fields(*, positions: int, norm_epsilon: float, is_tied: bool = False) -> tuple[Field, ...]:
    """Return the fields that all families like Llama have, given the defaults that differ."""
    norm = Value("rms_norm_eps", "norm_epsilon", norm_epsilon)
    return shape_fields(Fixed("hidden_act", ("silu",)), norm, positions=positions, is_tied=is_tied)


# Llama 2 to 3.3 (Touvron et al. 2023), with grouped-query attention, tied embeddings and Llama 3.1's RoPE scaling.
LLAMA = HFFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=NAMES,
    fields=(*common_fields(positions=2048, norm_epsilon=1e-6), Heads(), Rotary(), SameBiases()),
    settings=SETTINGS,
)

# Qwen2 and Qwen2.5 (Yang et al. 2024): biases of queries, keys and values.
QWEN_WINDOW = Window(width=4096, switch="use_sliding_window", first_field="max_window_layers", has_layer_types=True)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=(*common_fields(positions=32_768, norm_epsilon=1e-6), Heads(groups=32), Rotary(), QWEN_WINDOW),
    settings=SETTINGS | {"add_qkv_bias": True},
)

# Qwen3 (Yang et al. 2025), dense: norms of queries and keys, each over the channels of a head.
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names=NAMES | QK_NORM_NAMES,
    fields=(
        *common_fields(positions=32_768, norm_epsilon=1e-6),
        Heads(groups=32, width=128),
        Rotary(),
        NO_ATTENTION_BIAS,
        QWEN_WINDOW,
    ),
    settings=SETTINGS | {"qk_layernorm": True},
)

# Mistral 7B (Jiang et al. 2023) and its successors with the same layers: in version 0.1 with a window.
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=(*common_fields(positions=131_072, norm_epsilon=1e-6), Heads(groups=8), Rotary(), Window(width=4096)),
)

# SmolLM3 (Bakouch et al. 2025): every fourth layer has no rotary embedding.
SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fields=(
        *common_fields(positions=32_768, norm_epsilon=1e-6, is_tied=True),
        Heads(groups=4),
        Rotary(base=2_000_000),
        LayersWithoutRope(),
        SameBiases(),
        Fixed("use_sliding_window", (False,)),
    ),
)

# OLMo 2 (OLMo et al. 2024): norms of outputs in place of inputs, and of queries and keys over all heads.
OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    names=NAMES
    | QK_NORM_NAMES
    | {
        f"{ATTENTION}post_layernorm": (f"{LAYER}post_attention_layernorm",),
        f"{MLP}post_layernorm": (f"{LAYER}post_feedforward_layernorm",),
    },
    fields=(*common_fields(positions=2048, norm_epsilon=1e-5), Heads(), Rotary(), NO_ATTENTION_BIAS),
    settings=SETTINGS | {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_across_heads": True},
)

# Granite 3 (IBM 2024), dense: multipliers of embedding, attention, residual and logits.
GRANITE = replace(
    LLAMA,
    model_type="granite",
    architecture="GraniteForCausalLM",
    fields=(
        *LLAMA.fields,
        Value("embedding_multiplier", "embedding_multiplier", 1.0),
        Value("attention_multiplier", "softmax_scale", 1.0),
        Value("residual_multiplier", "residual_multiplier", 1.0),
        Value("logits_scaling", "logits_scaling", 1.0),
    ),
)

# Phi-3 and Phi-4 (Abdin et al. 2024): fused projections, in some sizes with partial rotary embeddings.
# megatron-core's gate and up projections are one matrix in the same order. The two frequency tables of `longrope` are
# refused: which of them is used depends on the length of the text.
PHI3 = replace(
    LLAMA,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    names=NAMES
    | {
        f"{ATTENTION}linear_qkv": (f"{LAYER}self_attn.qkv_proj",),
        f"{MLP}linear_fc1": (f"{LAYER}mlp.gate_up_proj",),
    },
    fields=(
        *common_fields(positions=4096, norm_epsilon=1e-5),
        SameDropout(("resid_pdrop", "embd_pdrop")),
        Heads(),
        Rotary(is_partial=True, kinds=("default",)),
        Window(),
    ),
    qkv=FusedQKV,
)
