"""StarCoder2 (Lozhkov et al. 2024): rotary positions, LayerNorm, GELU, biases and a sliding window."""

from __future__ import annotations

from megafp8.checkpoint.convert.families import llama
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Fixed, Gelu, Heads, Rotary, SameDropout, Value
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
        Value("hidden_size", "hidden_size"),
        Value("intermediate_size", "ffn_hidden_size"),
        Value("num_hidden_layers", "num_layers"),
        Gelu("hidden_act", tanh=("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), default="gelu_pytorch_tanh"),
        Value("max_position_embeddings", "max_position_embeddings", 4096),
        Value("initializer_range", "init_method_std", 0.018042),
        Value("norm_epsilon", "norm_epsilon", 1e-5),
        Value("tie_word_embeddings", "share_embeddings_and_output_weights", True),
        Value("attention_dropout", "attention_dropout", 0.0),
        SameDropout(("residual_dropout", "embedding_dropout")),
        Heads(groups=2, has_width=False),
        Rotary(),
        Window(),
        Fixed("use_bias", (True,)),
    ),
    settings={"position_embedding_type": "rope", "normalization": "LayerNorm", "add_bias_linear": True},
)
