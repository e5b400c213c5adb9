"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, biases, and `Conv1D` with transposed weights."""

from __future__ import annotations

import re
from typing import Any

from megafp8.checkpoint.convert.tensor_mapping import (
    FusedTransposedQKV,
    GroupedQKV,
    HFConfig,
    HFFamily,
    Identity,
    PaddedVocab,
    TensorMapping,
    Transposed,
    repeat_per_layer,
    unsupported_of,
)
from megafp8.config import derived
from megafp8.config.schema import ModelConfig, RunConfig

TANH_GELU, EXACT_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu"


def tensor_table(model: ModelConfig, num_tokens: int, num_rows: int) -> list[TensorMapping]:
    """Return the tensors of a model."""
    assert model.hidden_size is not None and model.num_layers is not None
    hidden, ffn = model.hidden_size, derived.ffn_hidden_size(model)
    heads = FusedTransposedQKV(GroupedQKV(derived.num_query_groups(model), derived.kv_channels(model)))
    tokens, same, transposed = PaddedVocab(num_tokens, num_rows), Identity(), Transposed()
    with_biases = [
        TensorMapping("self_attention.linear_qkv.layer_norm_weight", (hidden,), same, ("ln_1.weight",)),
        TensorMapping("self_attention.linear_qkv.weight", (3 * hidden, hidden), heads, ("attn.c_attn.weight",), True),
        TensorMapping("self_attention.linear_proj.weight", (hidden, hidden), transposed, ("attn.c_proj.weight",), True),
        TensorMapping("mlp.linear_fc1.layer_norm_weight", (hidden,), same, ("ln_2.weight",)),
        TensorMapping("mlp.linear_fc1.weight", (ffn, hidden), transposed, ("mlp.c_fc.weight",), True),
        TensorMapping("mlp.linear_fc2.weight", (hidden, ffn), transposed, ("mlp.c_proj.weight",), True),
    ]
    layer = [each for row in with_biases for each in (row, row.bias())]
    norm = TensorMapping("decoder.final_layernorm.weight", (hidden,), same, ("transformer.ln_f.weight",))
    positions = (model.max_position_embeddings or 0, hidden)
    table = [
        TensorMapping("embedding.word_embeddings.weight", (num_rows, hidden), tokens, ("transformer.wte.weight",)),
        TensorMapping("embedding.position_embeddings.weight", positions, same, ("transformer.wpe.weight",)),
        *repeat_per_layer(layer, model.num_layers, "decoder.layers.{}.", "transformer.h.{}."),
        norm,
        norm.bias(),
    ]
    if not model.share_embeddings_and_output_weights:
        table.append(TensorMapping("output_layer.weight", (num_rows, hidden), tokens, ("lm_head.weight",)))
    return table


def unsupported_features(config: RunConfig) -> list[str]:
    """Return the features of a run's model that GPT-2 does not support, as text."""
    model = config.model
    channels = derived.query_projection_size(model)
    checks = (
        (
            model.position_embedding_type != "learned_absolute",
            f"--position-embedding-type {model.position_embedding_type}: GPT-2 has learned_absolute",
        ),
        (model.normalization != "LayerNorm", f"--normalization {model.normalization}: GPT-2 has LayerNorm"),
        (model.swiglu, "--swiglu: GPT-2 has GELU"),
        (not model.add_bias_linear, "--disable-bias-linear: GPT-2 has biases"),
        (
            derived.num_query_groups(model) != model.num_attention_heads,
            f"--num-query-groups {model.num_query_groups}: in GPT-2 each head has keys and values of its own",
        ),
        (
            channels != model.hidden_size,
            f"--kv-channels {model.kv_channels}: in GPT-2 all heads together are as wide as the model",
        ),
    )
    return unsupported_of(config, checks)


def to_hf_config(config: RunConfig) -> dict[str, Any]:
    """Return the fields of config.json."""
    model = config.model
    return {
        "n_embd": model.hidden_size,
        "n_inner": derived.ffn_hidden_size(model),
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_positions": model.max_position_embeddings,
        # GELU fused with its bias is the tanh approximation.
        "activation_function": TANH_GELU[0] if config.precision.bias_gelu_fusion else EXACT_GELU,
        "initializer_range": model.init_method_std,
        "layer_norm_epsilon": model.norm_epsilon,
        "tie_word_embeddings": model.share_embeddings_and_output_weights,
        "attn_pdrop": model.attention_dropout,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    }


def from_hf_config(hf_config: HFConfig) -> dict[str, Any]:
    """Return settings of the model, and of the GELU variant."""
    gelu = hf_config.require("activation_function", *TANH_GELU, EXACT_GELU, default=TANH_GELU[0])
    hf_config.require("scale_attn_weights", True, default=True)
    hf_config.require("scale_attn_by_inverse_layer_idx", False, default=False)
    hf_config.require("add_cross_attention", False, default=False)
    hidden, positions = hf_config.positive_int("n_embd", 768), hf_config.positive_int("n_positions", 1024)
    dropout = hf_config.number("resid_pdrop", 0.1)
    hf_config.require("embd_pdrop", dropout, default=dropout)
    heads = hf_config.positive_int("n_head", 12)
    if hidden % heads:
        hf_config.problems.append(f"config.json: n_embd {hidden} is not a multiple of n_head {heads}")
    values = {
        "num_layers": hf_config.positive_int("n_layer", 12),
        "hidden_size": hidden,
        "ffn_hidden_size": hf_config.positive_int("n_inner", 4 * hidden),
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": hf_config.number("layer_norm_epsilon", 1e-5),
        "add_bias_linear": True,
        "share_embeddings_and_output_weights": hf_config.flag("tie_word_embeddings", True),
        "attention_dropout": hf_config.number("attn_pdrop", 0.1),
        "hidden_dropout": dropout,
        "init_method_std": hf_config.number("initializer_range", 0.02),
    }
    return {f"model.{name}": value for name, value in values.items()} | {
        "data.seq_length": positions,
        "precision.bias_gelu_fusion": gelu != EXACT_GELU,
    }


FAMILY = HFFamily(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    unsupported_features=unsupported_features,
    to_hf_config=to_hf_config,
    from_hf_config=from_hf_config,
    tensor_table=tensor_table,
    buffers=re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias"),
    prefix="transformer.",
)
