"""DeepSeek-V2 and V2-Lite (DeepSeek-AI 2024): multi-latent attention, and experts that a softmax over all selects."""

from __future__ import annotations

from megafp8.checkpoint.convert.deepseek_fields import (
    ExpertGroups,
    FirstDense,
    LatentHeads,
    ScoreFactor,
    SharedExperts,
)
from megafp8.checkpoint.convert.expert_fields import ExpertCount
from megafp8.checkpoint.convert.families import deepseek_v3, mixtral
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Fixed

FAMILY = HFFamily(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    names=deepseek_v3.NAMES,
    stacked_names=mixtral.STACKED_NAMES,
    fields=(
        *deepseek_v3.common_fields(positions=2048),
        LatentHeads(divides_width=True),
        Fixed("mlp_bias", (False,)),
        ExpertCount("n_routed_experts", "num_experts", 64),
        FirstDense(0),
        SharedExperts(2, 1407),
        ScoreFactor(1.0),
        Fixed("scoring_func", ("softmax",)),
        Fixed("norm_topk_prob", (False,)),
        ExpertGroups(1, ("greedy", "group_limited_greedy")),
    ),
    settings=deepseek_v3.SETTINGS | {"moe_router_pre_softmax": True},
)
