"""Families with LayerNorm, GELU and biases: GPT-2, GPT-NeoX with Pythia, and StarCoder2."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megafp8.checkpoint.convert.families import llama
from megafp8.checkpoint.convert.families.llama import ATTENTION, MLP
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Fixed, Gelu, Heads, Rotary, SameDropout, Value, Window, shape_fields
from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.checkpoint.convert.tensor_mapping import FusedTransposedQKV, Identity
from megafp8.config.schema import ModelConfig

SETTINGS = {"normalization": "LayerNorm", "add_bias_linear": True}


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

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"n_embd": model.hidden_size, "n_head": model.num_attention_heads, "n_inner": model.ffn_hidden_size}


# GPT-2 (Radford et al. 2019): learned positions, and `Conv1D` with transposed weights.
GPT2_LAYER = "transformer.h.{}."
GPT2_NAMES = {
    "embedding.word_embeddings": ("transformer.wte",),
    "embedding.position_embeddings": ("transformer.wpe",),
    f"{ATTENTION}linear_qkv.layer_norm": (f"{GPT2_LAYER}ln_1",),
    f"{ATTENTION}linear_qkv": (f"{GPT2_LAYER}attn.c_attn",),
    f"{ATTENTION}linear_proj": (f"{GPT2_LAYER}attn.c_proj",),
    f"{MLP}linear_fc1.layer_norm": (f"{GPT2_LAYER}ln_2",),
    f"{MLP}linear_fc1": (f"{GPT2_LAYER}mlp.c_fc",),
    f"{MLP}linear_fc2": (f"{GPT2_LAYER}mlp.c_proj",),
    "decoder.final_layernorm": ("transformer.ln_f",),
    "output_layer": ("lm_head",),
}
GPT2 = HFFamily(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    names=GPT2_NAMES,
    fields=(
        Widths(),
        Value("n_layer", "num_layers", 12),
        Value("n_positions", "max_position_embeddings", 1024),
        Gelu("activation_function", tanh=("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), default="gelu_new"),
        Value("initializer_range", "init_method_std", 0.02),
        Value("layer_norm_epsilon", "norm_epsilon", 1e-5),
        Value("tie_word_embeddings", "share_embeddings_and_output_weights", True),
        Value("attn_pdrop", "attention_dropout", 0.1),
        SameDropout(("resid_pdrop", "embd_pdrop"), 0.1),
        Fixed("scale_attn_weights", (True,)),
        Fixed("scale_attn_by_inverse_layer_idx", (False,)),
        Fixed("add_cross_attention", (False,)),
    ),
    settings=SETTINGS | {"position_embedding_type": "learned_absolute"},
    qkv=FusedTransposedQKV,
    has_conv1d=True,
    buffers=re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias"),
    prefix="transformer.",
)

# GPT-NeoX (Black et al. 2022) and Pythia: attention and MLP in parallel, partial rotary embeddings. The fused QKV
# projection has query, key and value of each head together, which is megatron-core's order.
NEOX_LAYER = "gpt_neox.layers.{}."
NEOX_NAMES = {
    "embedding.word_embeddings": ("gpt_neox.embed_in",),
    f"{ATTENTION}linear_qkv.layer_norm": (f"{NEOX_LAYER}input_layernorm",),
    f"{ATTENTION}linear_qkv": (f"{NEOX_LAYER}attention.query_key_value",),
    f"{ATTENTION}linear_proj": (f"{NEOX_LAYER}attention.dense",),
    f"{MLP}linear_fc1.layer_norm": (f"{NEOX_LAYER}post_attention_layernorm",),
    f"{MLP}linear_fc1": (f"{NEOX_LAYER}mlp.dense_h_to_4h",),
    f"{MLP}linear_fc2": (f"{NEOX_LAYER}mlp.dense_4h_to_h",),
    "decoder.final_layernorm": ("gpt_neox.final_layer_norm",),
    "output_layer": ("embed_out",),
}
GPT_NEOX = HFFamily(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    names=NEOX_NAMES,
    fields=(
        *shape_fields(
            Gelu("hidden_act", tanh=("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), default="gelu"),
            Value("layer_norm_eps", "norm_epsilon", 1e-5),
            positions=2048,
        ),
        Value("hidden_dropout", "hidden_dropout", 0.0),
        Value("use_parallel_residual", "parallel_residual", True),
        Heads(has_width=False, has_groups=False),
        Rotary(base_field="rotary_emb_base", percent_field="rotary_pct", percent=0.25, is_partial=True),
        Fixed("attention_bias", (True,)),
    ),
    settings=SETTINGS | {"position_embedding_type": "rope"},
    qkv=lambda groups: Identity(),
    buffers=re.compile(r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)"),
    prefix="gpt_neox.",
)

# StarCoder2 (Lozhkov et al. 2024): rotary positions and a sliding window.
STARCODER2 = HFFamily(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    names=llama.NAMES
    | {
        f"{MLP}linear_fc1": (f"{llama.LAYER}mlp.c_fc",),
        f"{MLP}linear_fc2": (f"{llama.LAYER}mlp.c_proj",),
    },
    fields=(
        *shape_fields(
            Gelu("hidden_act", tanh=("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), default="gelu_pytorch_tanh"),
            Value("norm_epsilon", "norm_epsilon", 1e-5),
            positions=4096,
            is_tied=True,
            init_std=0.018042,
        ),
        SameDropout(("residual_dropout", "embedding_dropout")),
        Heads(groups=2, has_width=False),
        Rotary(),
        Window(),
        Fixed("use_bias", (True,)),
    ),
    settings=SETTINGS | {"position_embedding_type": "rope"},
)
