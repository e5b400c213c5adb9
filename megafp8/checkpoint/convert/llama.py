"""Llama (Touvron et al. 2023; with grouped queries, tied embeddings and Llama 3.1's rotary scaling).

Both sides rotate the two halves of a head's channels (megatron-core without --rotary-interleaved), so queries and keys
need no permutation.
"""

from __future__ import annotations

import re
from typing import Any

from megafp8.checkpoint.convert.tensor_mapping import (
    Family,
    QueryGroups,
    Same,
    Stacked,
    TensorMapping,
    TheirConfig,
    Vocabulary,
    foreign_to_all,
    in_layers,
    named,
)
from megafp8.config import derived
from megafp8.config.schema import ModelConfig, RunConfig

# megatron-core's, which no flag changes.
ROTARY_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rows(model: ModelConfig, num_tokens: int, num_rows: int) -> list[TensorMapping]:
    """The tensors of a model."""
    assert model.hidden_size is not None and model.num_layers is not None
    hidden, ffn = model.hidden_size, derived.ffn_hidden_size(model)
    query, key = derived.query_projection_size(model), derived.kv_projection_size(model)
    groups = QueryGroups(derived.num_query_groups(model), derived.kv_channels(model))
    tokens, same, gated = Vocabulary(num_tokens, num_rows), Same(), Stacked()
    projections = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
    linears = [
        TensorMapping("self_attention.linear_qkv.weight", (query + 2 * key, hidden), groups, projections, True),
        TensorMapping("self_attention.linear_proj.weight", (hidden, query), same, ("self_attn.o_proj.weight",), True),
        TensorMapping(
            "mlp.linear_fc1.weight", (2 * ffn, hidden), gated, ("mlp.gate_proj.weight", "mlp.up_proj.weight"), True
        ),
        TensorMapping("mlp.linear_fc2.weight", (hidden, ffn), same, ("mlp.down_proj.weight",), True),
    ]
    layer = [
        TensorMapping("self_attention.linear_qkv.layer_norm_weight", (hidden,), same, ("input_layernorm.weight",)),
        TensorMapping("mlp.linear_fc1.layer_norm_weight", (hidden,), same, ("post_attention_layernorm.weight",)),
        *linears,
        *(row.bias() for row in linears if model.add_bias_linear),
    ]
    table = [
        TensorMapping("embedding.word_embeddings.weight", (num_rows, hidden), tokens, ("model.embed_tokens.weight",)),
        *in_layers(layer, model.num_layers, "decoder.layers.{}.", "model.layers.{}."),
        TensorMapping("decoder.final_layernorm.weight", (hidden,), same, ("model.norm.weight",)),
    ]
    if not model.share_embeddings_and_output_weights:
        table.append(TensorMapping("output_layer.weight", (num_rows, hidden), tokens, ("lm_head.weight",)))
    return table


def inexpressible(config: RunConfig) -> list[str]:
    """What Llama does not have."""
    model = config.model
    return [
        *named(
            model.position_embedding_type != "rope",
            f"--position-embedding-type {model.position_embedding_type}: Llama has rope",
        ),
        *named(model.normalization != "RMSNorm", f"--normalization {model.normalization}: Llama has RMSNorm"),
        *named(not (model.swiglu or model.squared_relu), "GELU: Llama has --swiglu"),
        *named(model.rotary_interleaved, "--rotary-interleaved: Llama rotates halves"),
        *named(model.rotary_percent != 1, f"--rotary-percent {model.rotary_percent:g}: Llama rotates all channels"),
        *named(
            model.add_qkv_bias and not model.add_bias_linear,
            "--add-qkv-bias: Llama has biases in all linears or in none",
        ),
        *named(
            model.use_rope_scaling and model.rotary_seq_len_interpolation_factor is not None,
            "--use-rope-scaling with --rotary-seq-len-interpolation-factor: Llama scales in one way",
        ),
        *foreign_to_all(config),
    ]


def to_theirs(config: RunConfig) -> dict[str, Any]:
    """The fields of config.json."""
    model = config.model
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": derived.ffn_hidden_size(model),
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": derived.num_query_groups(model),
        "head_dim": derived.kv_channels(model),
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings or config.data.seq_length,
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "rope_theta": float(model.rotary_base),
        "rope_scaling": rotary_scaling(model),
        "attention_bias": model.add_bias_linear,
        "mlp_bias": model.add_bias_linear,
        "attention_dropout": model.attention_dropout,
    }


def rotary_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """How positions are stretched; None where they are not."""
    if model.use_rope_scaling:
        return {"rope_type": "llama3", "factor": model.rope_scaling_factor} | ROTARY_SCALING
    if model.rotary_seq_len_interpolation_factor is not None:
        return {"rope_type": "linear", "factor": float(model.rotary_seq_len_interpolation_factor)}
    return None


def from_theirs(theirs: TheirConfig) -> dict[str, Any]:
    """Settings of the model."""
    theirs.demand("hidden_act", "silu", default="silu")
    hidden, heads = theirs.whole("hidden_size"), theirs.whole("num_attention_heads")
    groups, channels = theirs.whole("num_key_value_heads", heads), theirs.whole("head_dim", max(1, hidden // heads))
    has_biases = theirs.flag("attention_bias", False), theirs.flag("mlp_bias", False)
    if has_biases[0] != has_biases[1]:
        theirs.problems.append(
            f"config.json: attention_bias {has_biases[0]} and mlp_bias {has_biases[1]}; here all linears have biases "
            "or none has"
        )
    if heads % groups:
        theirs.problems.append(f"config.json: {heads} heads cannot share {groups} key/value heads evenly")
    max_positions = theirs.whole("max_position_embeddings", 2048)
    values = {
        "num_layers": theirs.whole("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": theirs.whole("intermediate_size"),
        "num_attention_heads": heads,
        "kv_channels": None if channels * heads == hidden else channels,
        "group_query_attention": groups != heads,
        "num_query_groups": 1 if groups == heads else groups,
        "max_position_embeddings": max_positions,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": theirs.number("rms_norm_eps", 1e-6),
        "swiglu": True,
        "add_bias_linear": has_biases[0],
        "share_embeddings_and_output_weights": theirs.flag("tie_word_embeddings", False),
        "attention_dropout": theirs.number("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "init_method_std": theirs.number("initializer_range", 0.02),
        **rotary_settings(theirs),
    }
    return {f"model.{name}": value for name, value in values.items()} | {"data.seq_length": max_positions}


def rotary_settings(theirs: TheirConfig) -> dict[str, Any]:
    """The rotary embedding; transformers 5 has `rope_parameters` where it had two fields before."""
    together = theirs.part("rope_parameters")
    scaling = theirs.part("rope_scaling") if theirs.fields.get("rope_scaling") else together
    base = together if "rope_theta" in together.fields else theirs
    theirs.demand("partial_rotary_factor", 1, default=1)
    together.demand("partial_rotary_factor", 1, default=1)
    values: dict[str, Any] = {"rotary_base": base.whole("rope_theta", 10_000)}
    spelling = "rope_type" if "rope_type" in scaling.fields else "type"
    kind = scaling.demand(spelling, "default", "linear", "llama3", default="default")
    if kind == "linear":
        values["rotary_seq_len_interpolation_factor"] = scaling.whole("factor")
    if kind == "llama3":
        values |= {"use_rope_scaling": True, "rope_scaling_factor": scaling.number("factor")}
        for field, value in ROTARY_SCALING.items():
            scaling.demand(field, value, default=None)
    return values


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    inexpressible=inexpressible,
    to_theirs=to_theirs,
    from_theirs=from_theirs,
    rows=rows,
    buffers=re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    prefix="model.",
)
