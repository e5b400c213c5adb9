"""OLMoE (Muennighoff et al. 2024): experts in every layer, and norms of queries and keys over all heads."""

from __future__ import annotations

from megafp8.checkpoint.convert.expert_fields import ExpertCount, ExpertWidth, NormalizedScores
from megafp8.checkpoint.convert.families import llama, mixtral, qwen3, qwen3_moe
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Fixed, Heads, Rotary, Value

FAMILY = HFFamily(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    names=qwen3.NAMES | qwen3_moe.EXPERT_NAMES,
    stacked_names=mixtral.STACKED_NAMES,
    fields=(
        *llama.common_fields(positions=4096, norm_epsilon=1e-5),
        Heads(has_width=False),
        Rotary(),
        Fixed("attention_bias", (False,)),
        Fixed("clip_qkv", (None,)),
        ExpertCount("num_experts", "num_local_experts", 64),
        ExpertWidth(),
        Value("num_experts_per_tok", "moe_router_topk", 8),
        NormalizedScores(),
    ),
    settings=llama.SETTINGS | {"qk_layernorm": True, "qk_layernorm_across_heads": True},
)
