"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused projections, in some sizes with partial rotary embeddings.

megatron-core's gate and up projections are one matrix in the same order. The two frequency tables of `longrope` are
refused: which of them is used depends on the length of the text.
"""

from __future__ import annotations

from megafp8.checkpoint.convert.families import llama
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Heads, Rotary, SameDropout
from megafp8.checkpoint.convert.layer_fields import Window
from megafp8.checkpoint.convert.tensor_mapping import FusedQKV

NAMES = llama.NAMES | {
    f"{llama.ATTENTION}linear_qkv": (f"{llama.LAYER}self_attn.qkv_proj",),
    f"{llama.MLP}linear_fc1": (f"{llama.LAYER}mlp.gate_up_proj",),
}

FAMILY = HFFamily(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    names=NAMES,
    fields=(
        *llama.common_fields(positions=4096, norm_epsilon=1e-5),
        SameDropout(("resid_pdrop", "embd_pdrop")),
        Heads(),
        Rotary(is_partial=True, kinds=("default",)),
        Window(),
    ),
    settings=llama.SETTINGS,
    qkv=FusedQKV,
)
