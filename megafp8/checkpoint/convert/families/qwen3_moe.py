"""Qwen3 with experts (Yang et al. 2025): the dense Qwen3 with experts in all layers or some."""

from __future__ import annotations

from megafp8.checkpoint.convert.expert_fields import ExpertCount, ExpertLayers, NormalizedScores
from megafp8.checkpoint.convert.families import llama, mixtral, qwen3
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Fixed, Heads, Rotary, Value
from megafp8.checkpoint.convert.layer_fields import Window

EXPERT = f"{llama.LAYER}mlp.experts.{{}}."
EXPERT_NAMES = {
    "decoder.layers.{}.pre_mlp_layernorm": (f"{llama.LAYER}post_attention_layernorm",),
    f"{llama.MLP}router": (f"{llama.LAYER}mlp.gate",),
    f"{llama.MLP}experts.experts.linear_fc1": (f"{EXPERT}gate_proj", f"{EXPERT}up_proj"),
    f"{llama.MLP}experts.experts.linear_fc2": (f"{EXPERT}down_proj",),
}

FAMILY = HFFamily(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names=qwen3.NAMES | EXPERT_NAMES,
    stacked_names=mixtral.STACKED_NAMES,
    fields=(
        *llama.common_fields(positions=32_768, norm_epsilon=1e-6),
        Heads(groups=4),
        Rotary(),
        Fixed("attention_bias", (False,)),
        Window(width=4096, switch="use_sliding_window"),
        ExpertCount("num_experts", "num_local_experts", 128),
        Value("moe_intermediate_size", "moe_ffn_hidden_size", 768),
        Value("num_experts_per_tok", "moe_router_topk", 8),
        NormalizedScores(),
        ExpertLayers(),
    ),
    settings=llama.SETTINGS | {"qk_layernorm": True},
)
