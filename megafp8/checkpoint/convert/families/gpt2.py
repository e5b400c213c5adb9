"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, biases, and `Conv1D` with transposed weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Fixed, Gelu, SameDropout, Value
from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.checkpoint.convert.tensor_mapping import FusedTransposedQKV
from megafp8.config.schema import RunConfig

ATTENTION, MLP = "decoder.layers.{}.self_attention.", "decoder.layers.{}.mlp."
LAYER = "transformer.h.{}."

NAMES = {
    "embedding.word_embeddings": ("transformer.wte",),
    "embedding.position_embeddings": ("transformer.wpe",),
    f"{ATTENTION}linear_qkv.layer_norm": (f"{LAYER}ln_1",),
    f"{ATTENTION}linear_qkv": (f"{LAYER}attn.c_attn",),
    f"{ATTENTION}linear_proj": (f"{LAYER}attn.c_proj",),
    f"{MLP}linear_fc1.layer_norm": (f"{LAYER}ln_2",),
    f"{MLP}linear_fc1": (f"{LAYER}mlp.c_fc",),
    f"{MLP}linear_fc2": (f"{LAYER}mlp.c_proj",),
    "decoder.final_layernorm": ("transformer.ln_f",),
    "output_layer": ("lm_head",),
}


@dataclass(frozen=True)
class Widths:
    """The model's width, its heads, which together are as wide, and the MLP's width, by default 4 times as wide."""

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        hidden, heads = hf_config.positive_int("n_embd", 768), hf_config.positive_int("n_head", 12)
        if hidden % heads:
            hf_config.problems.append(f"config.json: n_embd {hidden} is not a multiple of n_head {heads}")
        return {
            "model.hidden_size": hidden,
            "model.num_attention_heads": heads,
            "model.ffn_hidden_size": hf_config.positive_int("n_inner", 4 * hidden),
        }

    def write(self, config: RunConfig) -> dict[str, Any]:
        model = config.model
        return {"n_embd": model.hidden_size, "n_head": model.num_attention_heads, "n_inner": model.ffn_hidden_size}


FAMILY = HFFamily(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    names=NAMES,
    fields=(
        Widths(),
        Value("n_layer", "num_layers", 12),
        Value("n_positions", "max_position_embeddings", 1024),
        Gelu(
            "activation_function",
            tanh=("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
            default="gelu_new",
        ),
        Value("initializer_range", "init_method_std", 0.02),
        Value("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Value("tie_word_embeddings", "share_embeddings_and_output_weights", True),
        Value("attn_pdrop", "attention_dropout", 0.1),
        SameDropout(("resid_pdrop", "embd_pdrop"), 0.1),
        Fixed("scale_attn_weights", (True,)),
        Fixed("scale_attn_by_inverse_layer_idx", (False,)),
        Fixed("add_cross_attention", (False,)),
    ),
    settings={"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "add_bias_linear": True},
    qkv=FusedTransposedQKV,
    has_conv1d=True,
    buffers=re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias"),
    prefix="transformer.",
)
