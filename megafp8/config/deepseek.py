"""Fields of the presets with multi-latent attention, besides those of every Llama."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_BOTH: Mapping[str, Any] = MappingProxyType({
    "multi_latent_attention": True, "qk_layernorm": True, "kv_lora_rank": 512, "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "rotary_scaling_factor": 40.0, "max_position_embeddings": 163_840,
    "norm_epsilon": 1e-6, "moe_router_load_balancing_type": ("seq_aux_loss",),
})  # fmt: skip
DEEPSEEK_V3: Mapping[str, Any] = MappingProxyType({
    **_BOTH,
    "q_lora_rank": 1536, "mscale": 1.0, "mscale_all_dim": 1.0, "vocab_size": 129_280, "num_experts": 256,
    "moe_layer_freq": "([0]*3+[1]*58)", "moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048,
    "moe_router_topk": 8, "moe_router_num_groups": 8, "moe_router_group_topk": 4,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5, "moe_aux_loss_coeff": (1e-4,),
})  # fmt: skip
"""DeepSeek-V3 (DeepSeek-AI 2024) without its multi-token prediction."""
DEEPSEEK_V2_LITE: Mapping[str, Any] = MappingProxyType({
    **_BOTH,
    "mscale": 0.707, "mscale_all_dim": 0.707, "vocab_size": 102_400, "num_experts": 64,
    "moe_layer_freq": "([0]*1+[1]*26)", "moe_ffn_hidden_size": 1408, "moe_shared_expert_intermediate_size": 2816,
    "moe_router_topk": 6, "moe_router_pre_softmax": True, "moe_aux_loss_coeff": (1e-3,),
})  # fmt: skip
"""DeepSeek-V2-Lite (DeepSeek-AI 2024); its queries are not compressed."""
