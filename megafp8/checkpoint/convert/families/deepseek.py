"""DeepSeek-V2, V2-Lite and V3 (DeepSeek-AI 2024): multi-latent attention, and experts that a router selects.

transformers has no layers of multi-token prediction in its model. Files of the hub have them after the last layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megafp8.checkpoint.convert.families import llama, mixtures
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Field, Fixed, Rotary, Value, read_num_layers, shape_fields
from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.config import expert_layers
from megafp8.config.schema import ModelConfig


@dataclass(frozen=True)
class LatentHeads:
    """Heads of multi-latent attention. Every query head has its own key and value.

    Attributes:
        groups: key/value heads where config.json has none; 0 is one for each query head.
        divides_width: whether the class refuses a hidden size that is no multiple of the heads.
    """

    groups: int = 0
    divides_width: bool = False

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        heads, hidden = hf_config.positive_int("num_attention_heads"), hf_config.positive_int("hidden_size")
        hf_config.require("num_key_value_heads", heads, default=self.groups or heads)
        if self.divides_width and hidden % heads:
            hf_config.problems.append(f"config.json: hidden_size {hidden} is not a multiple of {heads} heads")
        return {"model.num_attention_heads": heads}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return dict.fromkeys(("num_attention_heads", "num_key_value_heads"), model.num_attention_heads)


@dataclass(frozen=True)
class LatentRotary(Rotary):
    """Rotary embedding of a part of each head's channels, with YaRN or without scaled frequencies.

    megatron-core rotates neighboring channels of a head in multi-latent attention, as DeepSeek's models do.
    """

    kinds: tuple[str, ...] = ("default", "yarn")

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        values = super().read(hf_config)
        has_yarn = values.pop("model.position_embedding_type", None) == "yarn"
        if values.get("model.yarn_correction_range_round_to_int") is False:
            hf_config.problems.append("config.json: rope_scaling: truncate is False; megatron-core always rounds here")
        return values | {"model.rope_type": "yarn" if has_yarn else "rope"}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        is_yarn = model.multi_latent_attention and model.rope_type == "yarn"
        return super().write(replace(model, position_embedding_type="yarn" if is_yarn else "rope"))


@dataclass(frozen=True)
class FirstDense:
    """Number of dense layers before those with experts.

    Attributes:
        default: where config.json has none.
    """

    default: int

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        num_layers, dense = read_num_layers(hf_config), hf_config.count("first_k_dense_replace", self.default)
        if dense >= num_layers:
            hf_config.problems.append(
                f"config.json: first_k_dense_replace {dense} leaves none of {num_layers} layers with experts"
            )
        chosen = [int(layer >= dense) for layer in range(num_layers)]
        return {"model.moe_layer_freq": "1" if all(chosen) else str(chosen)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        has_experts = expert_layers.expert_layers(model)
        return {"first_k_dense_replace": has_experts.index(True) if any(has_experts) else len(has_experts)}


@dataclass(frozen=True)
class SharedExperts:
    """Number of shared experts, each as wide as a routed one.

    Attributes:
        default: where config.json has none.
        width: of an expert where config.json has none.
    """

    default: int
    width: int

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        width = hf_config.positive_int("moe_intermediate_size", self.width)
        shared = hf_config.positive_int("n_shared_experts", self.default)
        return {"model.moe_ffn_hidden_size": width, "model.moe_shared_expert_intermediate_size": shared * width}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        width, shared = model.moe_ffn_hidden_size, model.moe_shared_expert_intermediate_size
        return {"moe_intermediate_size": width, "n_shared_experts": shared // width if shared and width else 0}


@dataclass(frozen=True)
class ExpertGroups:
    """Groups of experts, of which a token selects some before it selects experts.

    megatron-core takes the groups with the largest sum of their best k / g scores, where k are the experts and g the
    groups of a token. transformers always sums the same number of scores. All groups selected is no selection.

    Attributes:
        num_scores: of a group that transformers sums.
        methods: names of `topk_method` without and with groups.
        groups, chosen, experts: numbers of groups, of selected groups and of experts of a token where config.json has
            none; 0 if it has to have them.
    """

    num_scores: int
    methods: tuple[str, str]
    groups: int = 0
    chosen: int = 0
    experts: int = 0

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        without, grouped = self.methods
        experts = hf_config.positive_int("num_experts_per_tok", self.experts or None)
        values: dict[str, Any] = {
            "model.moe_router_topk": experts,
            "model.moe_router_num_groups": None,
            "model.moe_router_group_topk": None,
        }
        method = hf_config.require("topk_method", *dict.fromkeys(self.methods), default=without)
        if method != grouped:
            return values
        groups = hf_config.positive_int("n_group", self.groups or None)
        chosen = hf_config.positive_int("topk_group", self.chosen or None)
        if groups == chosen:
            return values
        if experts % chosen or experts // chosen != self.num_scores:
            hf_config.problems.append(
                f"config.json: topk_group {chosen} of n_group {groups}: transformers selects a group by its best "
                f"{self.num_scores}, megatron-core by its best num_experts_per_tok / topk_group = {experts} / {chosen}"
            )
        return values | {"model.moe_router_num_groups": groups, "model.moe_router_group_topk": chosen}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        groups, chosen = model.moe_router_num_groups or 1, model.moe_router_group_topk or 1
        return {
            "num_experts_per_tok": model.moe_router_topk, "n_group": groups, "topk_group": chosen,
            "topk_method": self.methods[model.moe_router_num_groups is not None],
        }  # fmt: skip


@dataclass(frozen=True)
class NormalizedSigmoids:
    """Whether the sigmoid scores of a token's experts are divided by their sum. Here several are, and one is not."""

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        is_several = hf_config.positive_int("num_experts_per_tok", 8) > 1
        hf_config.require("norm_topk_prob", is_several, default=True)
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"norm_topk_prob": model.moe_router_topk > 1}


ATTENTION = f"{llama.LAYER}self_attn."
SHARED = f"{llama.LAYER}mlp.shared_experts."
NAMES = (
    llama.NAMES
    | mixtures.EXPERT_NAMES
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


def common_fields(heads: LatentHeads, *, positions: int) -> tuple[Field, ...]:
    """Return the fields that both versions have."""
    return (
        *shape_fields(Fixed("hidden_act", ("silu",)), Fixed("rms_norm_eps", (EPSILON,)), positions=positions),
        llama.NO_ATTENTION_BIAS,
        Fixed("moe_layer_freq", (1,)),
        LatentRotary(),
        Value("kv_lora_rank", "kv_lora_rank", 512),
        Value("qk_nope_head_dim", "qk_head_dim", 128),
        Value("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
        Value("v_head_dim", "v_head_dim", 128),
        heads,
        Value("q_lora_rank", "q_lora_rank", 1536, is_optional=True),
    )


def score_factor(default: float) -> Value:
    """Return the field with the factor of the scores of the chosen experts."""
    return Value("routed_scaling_factor", "moe_router_topk_scaling_factor", default, neutral=1.0)


# V2 and V2-Lite: a softmax over all experts selects.
DEEPSEEK_V2 = HFFamily(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    names=NAMES,
    stacked_names=mixtures.STACKED_NAMES,
    fields=(
        *common_fields(LatentHeads(divides_width=True), positions=2048),
        Fixed("mlp_bias", (False,)),
        Value("n_routed_experts", "num_experts", 64, other="num_experts"),
        FirstDense(0),
        SharedExperts(2, 1407),
        score_factor(1.0),
        Fixed("scoring_func", ("softmax",)),
        Fixed("norm_topk_prob", (False,)),
        ExpertGroups(1, ("greedy", "group_limited_greedy")),
    ),
    settings=SETTINGS | {"moe_router_pre_softmax": True},
)

# V3: sigmoids with a bias select.
DEEPSEEK_V3 = HFFamily(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    names=NAMES,
    stacked_names=mixtures.STACKED_NAMES,
    fields=(
        *common_fields(LatentHeads(groups=128), positions=4096),
        Fixed("rope_interleave", (True,)),
        Value("n_routed_experts", "num_experts", 256, other="num_local_experts"),
        FirstDense(3),
        SharedExperts(1, 2048),
        score_factor(2.5),
        Fixed("scoring_func", ("sigmoid",)),
        ExpertGroups(2, ("noaux_tc", "noaux_tc"), groups=8, chosen=4, experts=8),
        NormalizedSigmoids(),
        Fixed("num_nextn_predict_layers", (0,), is_read=False),
    ),
    settings=SETTINGS | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    has_prediction_layers=True,
)
