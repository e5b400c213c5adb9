"""Qwen3 (Yang et al. 2025), dense: Llama with norms of queries and keys, each over the channels of a head."""

from __future__ import annotations

from megafp8.checkpoint.convert.families import llama, qwen2
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Fixed, Heads, Rotary

NAMES = llama.NAMES | {
    f"{llama.ATTENTION}q_layernorm": (f"{llama.LAYER}self_attn.q_norm",),
    f"{llama.ATTENTION}k_layernorm": (f"{llama.LAYER}self_attn.k_norm",),
}

FAMILY = HFFamily(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names=NAMES,
    fields=(
        *llama.common_fields(positions=32_768, norm_epsilon=1e-6),
        Heads(groups=32, width=128),
        Rotary(),
        Fixed("attention_bias", (False,)),
        qwen2.WINDOW,
    ),
    settings=llama.SETTINGS | {"qk_layernorm": True},
)
