"""Gemma 2 (Gemma Team 2024): norms of inputs and outputs, gated GELU, soft-capped logits, windows in every 2nd layer.

The embedding is multiplied by the root of the model's width. transformers rounds that factor to the dtype of the
model; here it is not rounded: 59.87 in place of 59.75 for the 9B model in BF16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megafp8.checkpoint.convert.families import llama
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Field, Fixed, Heads, OptionalNumber, Rotary, Value, shape_fields
from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.checkpoint.convert.layer_fields import Window
from megafp8.config.schema import RunConfig

NAMES = llama.NAMES | {
    f"{llama.ATTENTION}post_layernorm": (f"{llama.LAYER}post_attention_layernorm",),
    f"{llama.MLP}linear_fc1.layer_norm": (f"{llama.LAYER}pre_feedforward_layernorm",),
    f"{llama.MLP}post_layernorm": (f"{llama.LAYER}post_feedforward_layernorm",),
}
SETTINGS = {
    "position_embedding_type": "rope", "normalization": "RMSNorm", "apply_layernorm_1p": True, "geglu": True,
    "norm_placement": "sandwich", "add_bias_linear": False,
}  # fmt: skip


@dataclass(frozen=True)
class EmbeddingAndQueryScale:
    """The factor of the embedding, which is not in config.json, and that of Q*K, whose inverse square is there."""

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        scalar, width = hf_config.positive_int("query_pre_attn_scalar", 256), hf_config.positive_int("head_dim", 256)
        return {
            "model.embedding_multiplier": hf_config.positive_int("hidden_size") ** 0.5,
            "model.softmax_scale": None if scalar == width else scalar**-0.5,
        }

    def write(self, config: RunConfig) -> dict[str, Any]:
        assert config.model.softmax_scale is not None
        return {"query_pre_attn_scalar": round(config.model.softmax_scale**-2)}


def common_fields(positions: int) -> tuple[Field, ...]:
    """Return the fields that Gemma 2 and 3 have."""
    activation = Fixed("hidden_activation", ("gelu_pytorch_tanh",))
    return (
        *shape_fields(activation, Value("rms_norm_eps", "norm_epsilon", 1e-6), positions=positions, is_tied=True),
        Heads(groups=4, width=256),
        EmbeddingAndQueryScale(),
        Fixed("attention_bias", (False,)),
        Fixed("use_bidirectional_attention", (None, False), is_written=False),
    )


FAMILY = HFFamily(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    names=NAMES,
    fields=(
        *common_fields(positions=8192),
        Rotary(),
        Window(width=4096, every=2, has_layer_types=True),
        OptionalNumber("attn_logit_softcapping", "attention_logit_softcapping", 50.0),
        OptionalNumber("final_logit_softcapping", "output_logit_softcapping", 30.0),
    ),
    settings=SETTINGS,
)
