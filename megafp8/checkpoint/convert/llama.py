"""Llama (Touvron et al. 2023), with grouped-query attention, tied embeddings and Llama 3.1's RoPE scaling.

transformers and megatron-core (without --rotary-interleaved) both rotate the two halves of a head's channels, so query
and key weights need no permutation.
"""

from __future__ import annotations

import re
from typing import Any

from megafp8.checkpoint.convert.tensor_mapping import (
    GatedPair,
    GroupedQKV,
    HFConfig,
    HFFamily,
    Identity,
    PaddedVocab,
    TensorMapping,
    repeat_per_layer,
    unsupported_of,
)
from megafp8.config import derived
from megafp8.config.schema import ModelConfig, RunConfig

# Constants of megatron-core's RoPE scaling; no flag changes them.
ROTARY_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def tensor_table(model: ModelConfig, num_tokens: int, num_rows: int) -> list[TensorMapping]:
    """Return the tensors of a model."""
    assert model.hidden_size is not None and model.num_layers is not None
    hidden, ffn = model.hidden_size, derived.ffn_hidden_size(model)
    query, key = derived.query_projection_size(model), derived.kv_projection_size(model)
    groups = GroupedQKV(derived.num_query_groups(model), derived.kv_channels(model))
    tokens, same, gated = PaddedVocab(num_tokens, num_rows), Identity(), GatedPair()
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
        *repeat_per_layer(layer, model.num_layers, "decoder.layers.{}.", "model.layers.{}."),
        TensorMapping("decoder.final_layernorm.weight", (hidden,), same, ("model.norm.weight",)),
    ]
    if not model.share_embeddings_and_output_weights:
        table.append(TensorMapping("output_layer.weight", (num_rows, hidden), tokens, ("lm_head.weight",)))
    return table


def unsupported_features(config: RunConfig) -> list[str]:
    """Return the features of a run's model that Llama does not support, as text."""
    model = config.model
    checks = (
        (
            model.position_embedding_type != "rope",
            f"--position-embedding-type {model.position_embedding_type}: Llama has rope",
        ),
        (model.normalization != "RMSNorm", f"--normalization {model.normalization}: Llama has RMSNorm"),
        (not (model.swiglu or model.squared_relu), "GELU: Llama has --swiglu"),
        (model.rotary_interleaved, "--rotary-interleaved: Llama rotates halves"),
        (model.rotary_percent != 1, f"--rotary-percent {model.rotary_percent:g}: Llama rotates all channels"),
        (
            model.add_qkv_bias and not model.add_bias_linear,
            "--add-qkv-bias: Llama has biases in all linears or in none",
        ),
        (
            model.use_rope_scaling and model.rotary_seq_len_interpolation_factor is not None,
            "--use-rope-scaling with --rotary-seq-len-interpolation-factor: Llama scales in one way",
        ),
    )
    return unsupported_of(config, checks)


def to_hf_config(config: RunConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
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
    """Return `rope_scaling` of config.json; None without scaling."""
    if model.use_rope_scaling:
        return {"rope_type": "llama3", "factor": model.rope_scaling_factor} | ROTARY_SCALING
    if model.rotary_seq_len_interpolation_factor is not None:
        return {"rope_type": "linear", "factor": float(model.rotary_seq_len_interpolation_factor)}
    return None


def from_hf_config(hf_config: HFConfig) -> dict[str, Any]:
    """Return settings of the model."""
    hf_config.require("hidden_act", "silu", default="silu")
    hidden, heads = hf_config.positive_int("hidden_size"), hf_config.positive_int("num_attention_heads")
    groups, channels = (
        hf_config.positive_int("num_key_value_heads", heads),
        hf_config.positive_int("head_dim", max(1, hidden // heads)),
    )
    has_biases = hf_config.flag("attention_bias", False), hf_config.flag("mlp_bias", False)
    if has_biases[0] != has_biases[1]:
        hf_config.problems.append(
            f"config.json: attention_bias {has_biases[0]} and mlp_bias {has_biases[1]}; here all linears have biases "
            "or none has"
        )
    if heads % groups:
        hf_config.problems.append(f"config.json: {heads} heads cannot share {groups} key/value heads evenly")
    max_positions = hf_config.positive_int("max_position_embeddings", 2048)
    values = {
        "num_layers": hf_config.positive_int("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": hf_config.positive_int("intermediate_size"),
        "num_attention_heads": heads,
        "kv_channels": None if channels * heads == hidden else channels,
        "group_query_attention": groups != heads,
        "num_query_groups": 1 if groups == heads else groups,
        "max_position_embeddings": max_positions,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": hf_config.number("rms_norm_eps", 1e-6),
        "swiglu": True,
        "add_bias_linear": has_biases[0],
        "share_embeddings_and_output_weights": hf_config.flag("tie_word_embeddings", False),
        "attention_dropout": hf_config.number("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
        "init_method_std": hf_config.number("initializer_range", 0.02),
        **rotary_settings(hf_config),
    }
    return {f"model.{name}": value for name, value in values.items()} | {"data.seq_length": max_positions}


def rotary_settings(hf_config: HFConfig) -> dict[str, Any]:
    """Return settings of RoPE. transformers 5 has `rope_parameters` in place of two earlier fields."""
    parameters = hf_config.section("rope_parameters")
    scaling = hf_config.section("rope_scaling") if hf_config.fields.get("rope_scaling") else parameters
    base = parameters if "rope_theta" in parameters.fields else hf_config
    hf_config.require("partial_rotary_factor", 1, default=1)
    parameters.require("partial_rotary_factor", 1, default=1)
    values: dict[str, Any] = {"rotary_base": base.positive_int("rope_theta", 10_000)}
    spelling = "rope_type" if "rope_type" in scaling.fields else "type"
    kind = scaling.require(spelling, "default", "linear", "llama3", default="default")
    if kind == "linear":
        values["rotary_seq_len_interpolation_factor"] = scaling.positive_int("factor")
    if kind == "llama3":
        values |= {"use_rope_scaling": True, "rope_scaling_factor": scaling.number("factor")}
        for field, value in ROTARY_SCALING.items():
            scaling.require(field, value, default=None)
    return values


FAMILY = HFFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    unsupported_features=unsupported_features,
    to_hf_config=to_hf_config,
    from_hf_config=from_hf_config,
    tensor_table=tensor_table,
    buffers=re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    prefix="model.",
)
