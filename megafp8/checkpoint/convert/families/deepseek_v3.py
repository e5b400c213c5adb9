"""DeepSeek-V3 (DeepSeek-AI 2024): multi-latent attention, and experts that sigmoids with a bias select.

transformers has no layers of multi-token prediction in its model. Files of the hub have them after the last layer.
"""

from __future__ import annotations

from megafp8.checkpoint.convert.deepseek_fields import (
    ExpertGroups,
    FirstDense,
    LatentHeads,
    LatentRotary,
    NormalizedSigmoids,
    ScoreFactor,
    SharedExperts,
)
from megafp8.checkpoint.convert.expert_fields import ExpertCount
from megafp8.checkpoint.convert.families import llama, mixtral, qwen3_moe
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Field, Fixed, shape_fields

ATTENTION = f"{llama.LAYER}self_attn."
SHARED = f"{llama.LAYER}mlp.shared_experts."
NAMES = (
    llama.NAMES
    | qwen3_moe.EXPERT_NAMES
    | {
        "decoder.layers.{}.input_layernorm": (f"{llama.LAYER}input_layernorm",),
        f"{llama.ATTENTION}linear_q_proj": (f"{ATTENTION}q_proj",),
        f"{llama.ATTENTION}linear_q_down_proj": (f"{ATTENTION}q_a_proj",),
        f"{llama.ATTENTION}linear_q_up_proj.layer_norm": (f"{ATTENTION}q_a_layernorm",),
        f"{llama.ATTENTION}linear_q_up_proj": (f"{ATTENTION}q_b_proj",),
        f"{llama.ATTENTION}linear_kv_down_proj": (f"{ATTENTION}kv_a_proj_with_mqa",),
        f"{llama.ATTENTION}linear_kv_up_proj.layer_norm": (f"{ATTENTION}kv_a_layernorm",),
        f"{llama.ATTENTION}linear_kv_up_proj": (f"{ATTENTION}kv_b_proj",),
        f"{llama.MLP}shared_experts.linear_fc1": (f"{SHARED}gate_proj", f"{SHARED}up_proj"),
        f"{llama.MLP}shared_experts.linear_fc2": (f"{SHARED}down_proj",),
    }
)
# The norms of compressed queries, keys and values have an epsilon of 1e-6 there, and here that of all norms.
EPSILON = 1e-6
SETTINGS = llama.SETTINGS | {"multi_latent_attention": True, "qk_layernorm": True, "norm_epsilon": EPSILON}


def common_fields(*, positions: int) -> tuple[Field, ...]:
    """Return the fields that DeepSeek-V2 has as well."""
    return (
        *shape_fields(Fixed("hidden_act", ("silu",)), Fixed("rms_norm_eps", (EPSILON,)), positions=positions),
        Fixed("attention_bias", (False,)),
        Fixed("moe_layer_freq", (1,)),
        LatentRotary(),
    )


FAMILY = HFFamily(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    names=NAMES,
    stacked_names=mixtral.STACKED_NAMES,
    fields=(
        *common_fields(positions=4096),
        LatentHeads(groups=128),
        Fixed("rope_interleave", (True,)),
        ExpertCount("n_routed_experts", "num_local_experts", 256),
        FirstDense(3),
        SharedExperts(1, 2048),
        ScoreFactor(2.5),
        Fixed("scoring_func", ("sigmoid",)),
        ExpertGroups(2, ("noaux_tc", "noaux_tc"), groups=8, chosen=4, experts=8),
        NormalizedSigmoids(),
        Fixed("num_nextn_predict_layers", (0,), is_read=False),
    ),
    settings=SETTINGS | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    has_prediction_layers=True,
)
