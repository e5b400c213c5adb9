"""Values derived from the settings of multi-latent attention. Below `derived`, which precision maps need.

A down projection compresses the hidden states, an up projection expands the result to heads. Down projections are not
split over tensor-parallel ranks: each rank has the complete weight, and projects its part of the sequence.
"""

from __future__ import annotations

from typing import NamedTuple

from megafp8.config.schema import ModelConfig

PROJECTIONS = (
    "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"
)  # fmt: skip
DOWN_PROJECTIONS = ("linear_q_down_proj", "linear_kv_down_proj")
DEFAULT_ORIGINAL_POSITIONS = 4096  # megatron-core's


class LinearShape(NamedTuple):
    """A linear of attention over all ranks.

    Attributes:
        split: what tensor-parallel ranks divide: `outputs`, `inputs` or, for a down projection, nothing (empty).
    """

    name: str
    out_features: int
    in_features: int
    split: str


def is_latent(model: ModelConfig) -> bool:
    """Whether the model has multi-latent attention."""
    return model.multi_latent_attention


def uses_yarn(model: ModelConfig) -> bool:
    """Whether rotary embeddings are extended by YaRN, which is the default of multi-latent attention."""
    if is_latent(model):
        return model.rope_type != "rope"
    return model.position_embedding_type == "yarn"


def query_key_channels(model: ModelConfig) -> int:
    """Channels of one query or key head, those with rotary embedding included."""
    return model.qk_head_dim + model.qk_pos_emb_head_dim


def linear_shapes(model: ModelConfig) -> tuple[LinearShape, ...]:
    """The linears of multi-latent attention, in the order of the forward pass."""
    hidden, heads, rank = model.hidden_size, model.num_attention_heads, model.q_lora_rank
    assert hidden is not None and heads is not None
    queries = heads * query_key_channels(model)
    if rank is None:
        query = [LinearShape("linear_q_proj", queries, hidden, "outputs")]
    else:
        query = [
            LinearShape("linear_q_down_proj", rank, hidden, ""),
            LinearShape("linear_q_up_proj", queries, rank, "outputs"),
        ]
    return (
        *query,
        LinearShape("linear_kv_down_proj", model.kv_lora_rank + model.qk_pos_emb_head_dim, hidden, ""),
        LinearShape("linear_kv_up_proj", heads * (model.qk_head_dim + model.v_head_dim), model.kv_lora_rank, "outputs"),
        LinearShape("linear_proj", hidden, heads * model.v_head_dim, "inputs"),
    )


def linear_names(model: ModelConfig) -> tuple[str, ...]:
    """The names of these linears."""
    query = ("linear_q_proj",) if model.q_lora_rank is None else ("linear_q_down_proj", "linear_q_up_proj")
    return (*query, "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")


def num_weights(model: ModelConfig) -> int:
    """Weights of the linears of one layer's attention."""
    return sum(linear.out_features * linear.in_features for linear in linear_shapes(model))


def num_replicated_weights(model: ModelConfig) -> int:
    """Those of them that every tensor-parallel rank has."""
    return sum(linear.out_features * linear.in_features for linear in linear_shapes(model) if not linear.split)


def num_norm_channels(model: ModelConfig) -> int:
    """Channels of the norms of the compressed queries, keys and values (--qk-layernorm)."""
    return (model.q_lora_rank or 0) + model.kv_lora_rank


def mean_channels(model: ModelConfig) -> float:
    """The mean of the channels of all query heads and of all value heads, which attention's FLOPs depend on."""
    assert model.num_attention_heads is not None
    return model.num_attention_heads * (query_key_channels(model) + model.v_head_dim) / 2
