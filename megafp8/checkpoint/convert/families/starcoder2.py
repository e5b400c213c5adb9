"""StarCoder2 (Lozhkov et al. 2024): rotary positions, LayerNorm, GELU, biases and a sliding window."""

from __future__ import annotations

from megafp8.checkpoint.convert.families import llama
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Fixed, Gelu, Heads, Rotary, SameDropout, Value, shape_fields
from megafp8.checkpoint.convert.layer_fields import Window

NAMES = llama.NAMES | {
    f"{llama.MLP}linear_fc1": (f"{llama.LAYER}mlp.c_fc",),
    f"{llama.MLP}linear_fc2": (f"{llama.LAYER}mlp.c_proj",),
}

FAMILY = HFFamily(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    names=NAMES,
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
    settings={"position_embedding_type": "rope", "normalization": "LayerNorm", "add_bias_linear": True},
)
