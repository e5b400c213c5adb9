"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, biases; weights of `Conv1D` are transposed."""

from __future__ import annotations

import re
from typing import Any

from megafp8.checkpoint.convert.tensor_mapping import (
    Family,
    FusedQueryGroups,
    QueryGroups,
    Same,
    TensorMapping,
    TheirConfig,
    Transposed,
    Vocabulary,
    foreign_to_all,
    in_layers,
    named,
)
from megafp8.config import derived
from megafp8.config.schema import ModelConfig, RunConfig

TANH_GELU, EXACT_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu"


def rows(model: ModelConfig, num_tokens: int, num_rows: int) -> list[TensorMapping]:
    """The tensors of a model."""
    assert model.hidden_size is not None and model.num_layers is not None
    hidden, ffn = model.hidden_size, derived.ffn_hidden_size(model)
    heads = FusedQueryGroups(QueryGroups(derived.num_query_groups(model), derived.kv_channels(model)))
    tokens, same, transposed = Vocabulary(num_tokens, num_rows), Same(), Transposed()
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
        *in_layers(layer, model.num_layers, "decoder.layers.{}.", "transformer.h.{}."),
        norm,
        norm.bias(),
    ]
    if not model.share_embeddings_and_output_weights:
        table.append(TensorMapping("output_layer.weight", (num_rows, hidden), tokens, ("lm_head.weight",)))
    return table


def inexpressible(config: RunConfig) -> list[str]:
    """What GPT-2 does not have."""
    model = config.model
    channels = derived.query_projection_size(model)
    return [
        *named(
            model.position_embedding_type != "learned_absolute",
            f"--position-embedding-type {model.position_embedding_type}: GPT-2 has learned_absolute",
        ),
        *named(model.normalization != "LayerNorm", f"--normalization {model.normalization}: GPT-2 has LayerNorm"),
        *named(model.swiglu, "--swiglu: GPT-2 has GELU"),
        *named(not model.add_bias_linear, "--disable-bias-linear: GPT-2 has biases"),
        *named(
            derived.num_query_groups(model) != model.num_attention_heads,
            f"--num-query-groups {model.num_query_groups}: in GPT-2 each head has keys and values of its own",
        ),
        *named(
            channels != model.hidden_size,
            f"--kv-channels {model.kv_channels}: in GPT-2 all heads together are as wide as the model",
        ),
        *foreign_to_all(config),
    ]


def to_theirs(config: RunConfig) -> dict[str, Any]:
    """The fields of config.json."""
    model = config.model
    return {
        "n_embd": model.hidden_size,
        "n_inner": derived.ffn_hidden_size(model),
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_positions": model.max_position_embeddings,
        # As megafp8 computes it: fused with its bias, it is the approximation by tanh.
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


def from_theirs(theirs: TheirConfig) -> dict[str, Any]:
    """Settings of the model, and which GELU it has."""
    gelu = theirs.demand("activation_function", *TANH_GELU, EXACT_GELU, default=TANH_GELU[0])
    theirs.demand("scale_attn_weights", True, default=True)
    theirs.demand("scale_attn_by_inverse_layer_idx", False, default=False)
    theirs.demand("add_cross_attention", False, default=False)
    hidden, positions = theirs.whole("n_embd", 768), theirs.whole("n_positions", 1024)
    dropout = theirs.number("resid_pdrop", 0.1)
    theirs.demand("embd_pdrop", dropout, default=dropout)
    heads = theirs.whole("n_head", 12)
    if hidden % heads:
        theirs.problems.append(f"config.json: n_embd {hidden} is not a multiple of n_head {heads}")
    values = {
        "num_layers": theirs.whole("n_layer", 12),
        "hidden_size": hidden,
        "ffn_hidden_size": theirs.whole("n_inner", 4 * hidden),
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": theirs.number("layer_norm_epsilon", 1e-5),
        "add_bias_linear": True,
        "share_embeddings_and_output_weights": theirs.flag("tie_word_embeddings", True),
        "attention_dropout": theirs.number("attn_pdrop", 0.1),
        "hidden_dropout": dropout,
        "init_method_std": theirs.number("initializer_range", 0.02),
    }
    return {f"model.{name}": value for name, value in values.items()} | {
        "data.seq_length": positions,
        "precision.bias_gelu_fusion": gelu != EXACT_GELU,
    }


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    inexpressible=inexpressible,
    to_theirs=to_theirs,
    from_theirs=from_theirs,
    rows=rows,
    buffers=re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias"),
    prefix="transformer.",
)
