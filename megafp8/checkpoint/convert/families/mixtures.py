"""Mixtures of experts with Llama's layers: Mixtral, Qwen3 with experts, and OLMoE.

Settings of the router's losses, noise and capacities are those of a run: transformers computes without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megafp8.checkpoint.convert.families import llama
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Fixed, Heads, Rotary, Value, Window, read_num_layers
from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.config import expert_layers
from megafp8.config.schema import ModelConfig

EXPERTS = f"{llama.MLP}experts.experts."
# The second `{}` stands for the expert.
EXPERT = f"{llama.LAYER}mlp.experts.{{}}."
EXPERT_NAMES = {
    "decoder.layers.{}.pre_mlp_layernorm": (f"{llama.LAYER}post_attention_layernorm",),
    f"{llama.MLP}router": (f"{llama.LAYER}mlp.gate",),
    f"{EXPERTS}linear_fc1": (f"{EXPERT}gate_proj", f"{EXPERT}up_proj"),
    f"{EXPERTS}linear_fc2": (f"{EXPERT}down_proj",),
}
STACKED_NAMES = {
    f"{llama.MLP}router": (f"{llama.LAYER}mlp.gate",),
    f"{EXPERTS}linear_fc1": (f"{llama.LAYER}mlp.experts.gate_up_proj",),
    f"{EXPERTS}linear_fc2": (f"{llama.LAYER}mlp.experts.down_proj",),
}
# In families without dense layers: the field of an MLP's width is that of an expert.
EXPERT_WIDTH = Value("intermediate_size", "moe_ffn_hidden_size")
# Whether the scores of a token's experts have the sum 1. transformers divides scores over all experts by the sum of the
# chosen ones. This is the softmax of the chosen experts' logits, megatron-core's default. Without the division it is
# that of --moe-router-pre-softmax.
NORMALIZED_SCORES = Value("norm_topk_prob", "moe_router_pre_softmax", False, is_inverse=True)


@dataclass(frozen=True)
class ExpertLayers:
    """Layers with experts: every N-th one except for a list of dense ones.

    The last of each N layers has experts. With `--moe-layer-freq N` it is the first, so a list is used here.
    """

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        num_layers, step = read_num_layers(hf_config), hf_config.positive_int("decoder_sparse_step", 1)
        dense = hf_config.fields.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(each) is int for each in dense):
            hf_config.problems.append(f"config.json: mlp_only_layers is {dense!r} and no list of layers")
            dense = []
        is_dense = set(dense)
        chosen = [int((layer + 1) % step == 0 and layer not in is_dense) for layer in range(num_layers)]
        if not any(chosen):
            hf_config.problems.append(
                f"config.json: decoder_sparse_step {step} and mlp_only_layers {dense!r} leave no layer with experts"
            )
        return {"model.moe_layer_freq": "1" if all(chosen) else str(chosen)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        has_experts = expert_layers.expert_layers(model)
        dense = [layer for layer, each in enumerate(has_experts) if not each]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


# Mixtral (Jiang et al. 2024): Mistral with experts in every layer, whose scores have the sum 1.
BLOCK = f"{llama.LAYER}block_sparse_moe."
MIXTRAL = HFFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    names=llama.NAMES
    | EXPERT_NAMES
    | {
        f"{llama.MLP}router": (f"{BLOCK}gate",),
        f"{EXPERTS}linear_fc1": (f"{BLOCK}experts.{{}}.w1", f"{BLOCK}experts.{{}}.w3"),
        f"{EXPERTS}linear_fc2": (f"{BLOCK}experts.{{}}.w2",),
    },
    stacked_names=STACKED_NAMES,
    fields=(
        *llama.common_fields(positions=131_072, norm_epsilon=1e-5),
        Heads(groups=8),
        Rotary(base=1_000_000),
        Window(),
        Value("num_local_experts", "num_experts", 8, other="num_experts"),
        EXPERT_WIDTH,
        Value("num_experts_per_tok", "moe_router_topk", 2),
        Fixed("router_jitter_noise", (0.0,), is_written=False),
    ),
    settings=llama.SETTINGS,
)

# Qwen3 with experts (Yang et al. 2025): the dense Qwen3 with experts in all layers or some.
QWEN3_MOE = HFFamily(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names=llama.NAMES | llama.QK_NORM_NAMES | EXPERT_NAMES,
    stacked_names=STACKED_NAMES,
    fields=(
        *llama.common_fields(positions=32_768, norm_epsilon=1e-6),
        Heads(groups=4),
        Rotary(),
        llama.NO_ATTENTION_BIAS,
        Window(width=4096, switch="use_sliding_window"),
        Value("num_experts", "num_experts", 128, other="num_local_experts"),
        Value("moe_intermediate_size", "moe_ffn_hidden_size", 768),
        Value("num_experts_per_tok", "moe_router_topk", 8),
        NORMALIZED_SCORES,
        ExpertLayers(),
    ),
    settings=llama.QWEN3.settings,
)

# OLMoE (Muennighoff et al. 2024): experts in every layer, and norms of queries and keys over all heads.
OLMOE = HFFamily(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    names=QWEN3_MOE.names,
    stacked_names=STACKED_NAMES,
    fields=(
        *llama.common_fields(positions=4096, norm_epsilon=1e-5),
        Heads(has_width=False),
        Rotary(),
        llama.NO_ATTENTION_BIAS,
        Fixed("clip_qkv", (None,)),
        Value("num_experts", "num_experts", 64, other="num_local_experts"),
        EXPERT_WIDTH,
        Value("num_experts_per_tok", "moe_router_topk", 8),
        NORMALIZED_SCORES,
    ),
    settings=llama.SETTINGS | {"qk_layernorm": True, "qk_layernorm_across_heads": True},
)
