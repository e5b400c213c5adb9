"""Mixtral (Jiang et al. 2024): Mistral with experts in every layer, whose scores have the sum 1."""

from __future__ import annotations

from megafp8.checkpoint.convert.expert_fields import ExpertCount, ExpertWidth
from megafp8.checkpoint.convert.families import llama
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Fixed, Heads, Rotary, Value
from megafp8.checkpoint.convert.layer_fields import Window

BLOCK = f"{llama.LAYER}block_sparse_moe."
# The second `{}` stands for the expert.
NAMES = llama.NAMES | {
    "decoder.layers.{}.pre_mlp_layernorm": (f"{llama.LAYER}post_attention_layernorm",),
    f"{llama.MLP}router": (f"{BLOCK}gate",),
    f"{llama.MLP}experts.experts.linear_fc1": (f"{BLOCK}experts.{{}}.w1", f"{BLOCK}experts.{{}}.w3"),
    f"{llama.MLP}experts.experts.linear_fc2": (f"{BLOCK}experts.{{}}.w2",),
}
STACKED_NAMES = {
    f"{llama.MLP}router": (f"{llama.LAYER}mlp.gate",),
    f"{llama.MLP}experts.experts.linear_fc1": (f"{llama.LAYER}mlp.experts.gate_up_proj",),
    f"{llama.MLP}experts.experts.linear_fc2": (f"{llama.LAYER}mlp.experts.down_proj",),
}

FAMILY = HFFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    names=NAMES,
    stacked_names=STACKED_NAMES,
    fields=(
        *llama.common_fields(positions=4096 * 32, norm_epsilon=1e-5),
        Heads(groups=8),
        Rotary(base=1_000_000),
        Window(),
        ExpertCount("num_local_experts", "num_experts", 8),
        ExpertWidth(),
        Value("num_experts_per_tok", "moe_router_topk", 2),
        Fixed("router_jitter_noise", (0.0,), is_written=False),
    ),
    settings=llama.SETTINGS,
)
