"""GPT-NeoX (Black et al. 2022) and Pythia: attention and MLP in parallel, partial rotary embeddings, biases.

Its fused QKV projection has query, key and value of each head together, which is megatron-core's order.
"""

from __future__ import annotations

import re

from megafp8.checkpoint.convert.families.llama import ATTENTION, MLP
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Fixed, Gelu, Heads, Rotary, Value, shape_fields
from megafp8.checkpoint.convert.tensor_mapping import Identity

LAYER = "gpt_neox.layers.{}."

NAMES = {
    "embedding.word_embeddings": ("gpt_neox.embed_in",),
    f"{ATTENTION}linear_qkv.layer_norm": (f"{LAYER}input_layernorm",),
    f"{ATTENTION}linear_qkv": (f"{LAYER}attention.query_key_value",),
    f"{ATTENTION}linear_proj": (f"{LAYER}attention.dense",),
    f"{MLP}linear_fc1.layer_norm": (f"{LAYER}post_attention_layernorm",),
    f"{MLP}linear_fc1": (f"{LAYER}mlp.dense_h_to_4h",),
    f"{MLP}linear_fc2": (f"{LAYER}mlp.dense_4h_to_h",),
    "decoder.final_layernorm": ("gpt_neox.final_layer_norm",),
    "output_layer": ("embed_out",),
}

FAMILY = HFFamily(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    names=NAMES,
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
    settings={"position_embedding_type": "rope", "normalization": "LayerNorm", "add_bias_linear": True},
    qkv=lambda groups: Identity(),
    buffers=re.compile(r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)"),
    prefix="gpt_neox.",
)
