"""Llama 2 to 3.3 (Touvron et al. 2023), with grouped-query attention, tied embeddings and Llama 3.1's RoPE scaling.

transformers and megatron-core (without --rotary-interleaved) both rotate the two halves of a head's channels, so query
and key weights need no permutation.
"""

from __future__ import annotations

from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Field, Fixed, Heads, Rotary, SameBiases, Value, shape_fields

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
SETTINGS = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False}


def common_fields(*, positions: int, norm_epsilon: float, is_tied: bool = False) -> tuple[Field, ...]:
    """Return the fields that all families like Llama have, given the defaults that differ."""
    norm = Value("rms_norm_eps", "norm_epsilon", norm_epsilon)
    return shape_fields(Fixed("hidden_act", ("silu",)), norm, positions=positions, is_tied=is_tied)


FAMILY = HFFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=NAMES,
    fields=(*common_fields(positions=2048, norm_epsilon=1e-6), Heads(), Rotary(), SameBiases()),
    settings=SETTINGS,
)
