"""OLMo 2 (OLMo et al. 2024): Llama with norms of outputs in place of inputs, and of queries and keys over all heads."""

from __future__ import annotations

from megafp8.checkpoint.convert.families import llama
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Fixed, Heads, Rotary

NAMES = llama.NAMES | {
    f"{llama.ATTENTION}q_layernorm": (f"{llama.LAYER}self_attn.q_norm",),
    f"{llama.ATTENTION}k_layernorm": (f"{llama.LAYER}self_attn.k_norm",),
    f"{llama.ATTENTION}post_layernorm": (f"{llama.LAYER}post_attention_layernorm",),
    f"{llama.MLP}post_layernorm": (f"{llama.LAYER}post_feedforward_layernorm",),
}

FAMILY = HFFamily(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    names=NAMES,
    fields=(
        *llama.common_fields(positions=2048, norm_epsilon=1e-5),
        Heads(),
        Rotary(),
        Fixed("attention_bias", (False,)),
    ),
    settings=llama.SETTINGS | {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_across_heads": True},
)
