"""Gemma 2 (Gemma Team 2024) and the text model of Gemma 3 (2025).

They have norms of inputs and outputs, a gated GELU, soft-capped logits and windows. The embedding is multiplied by the
root of the model's width. transformers rounds that factor to the dtype of the model; here it is not rounded: 59.87 in
place of 59.75 for the 9B model in BF16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from megafp8.checkpoint.convert.families import llama
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import FULL, SLIDING, Field, Fixed, Heads, Rotary, Value, Window, shape_fields
from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.config.schema import ModelConfig

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

    def write(self, model: ModelConfig) -> dict[str, Any]:
        assert model.softmax_scale is not None
        return {"query_pre_attn_scalar": round(model.softmax_scale**-2)}


def common_fields(positions: int) -> tuple[Field, ...]:
    """Return the fields that Gemma 2 and 3 have."""
    activation = Fixed("hidden_activation", ("gelu_pytorch_tanh",))
    return (
        *shape_fields(activation, Value("rms_norm_eps", "norm_epsilon", 1e-6), positions=positions, is_tied=True),
        Heads(groups=4, width=256),
        EmbeddingAndQueryScale(),
        llama.NO_ATTENTION_BIAS,
        Fixed("use_bidirectional_attention", (None, False), is_written=False),
    )


def soft_caps(attention: Optional[float], output: Optional[float]) -> tuple[Field, ...]:
    """Return the fields with the caps of attention and output logits, given the defaults."""
    return (
        Value("attn_logit_softcapping", "attention_logit_softcapping", attention, is_optional=True),
        Value("final_logit_softcapping", "output_logit_softcapping", output, is_optional=True),
    )


@dataclass(frozen=True)
class TwoRotaries(Rotary):
    """Rotary embeddings of layers with full attention, which may be scaled, and of those with a sliding window.

    transformers 5 has both in `rope_parameters`, by the kind of layer.
    """

    def read(self, hf_config: HFConfig) -> dict[str, Any]:
        parameters = hf_config.section("rope_parameters")
        full, local = parameters.section(FULL), parameters.section(SLIDING)
        of_full = HFConfig({**hf_config.fields, "rope_parameters": full.fields})
        of_full.problems = hf_config.problems
        local.require("rope_type", "default", default="default")
        holder, field = (local, "rope_theta") if "rope_theta" in local.fields else (hf_config, "rope_local_base_freq")
        return super().read(of_full) | {"model.rotary_base_local": holder.positive_int(field, 10_000)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return super().write(model) | {"rope_local_base_freq": float(model.rotary_base_local or model.rotary_base)}


# Gemma 2: windows in every 2nd layer.
GEMMA2 = HFFamily(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    names=NAMES,
    fields=(
        *common_fields(positions=8192),
        Rotary(),
        Window(width=4096, every=2, has_layer_types=True),
        *soft_caps(50.0, 30.0),
    ),
    settings=SETTINGS,
)

# Gemma 3: norms of queries and keys, and other rotary bases in windows.
GEMMA3 = HFFamily(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    names=NAMES | llama.QK_NORM_NAMES,
    fields=(
        *common_fields(positions=131_072),
        TwoRotaries(base=1_000_000, kinds=("default", "linear")),
        Window(width=4096, every=6, every_field="sliding_window_pattern", has_layer_types=True),
        *soft_caps(None, None),
    ),
    settings=SETTINGS | {"qk_layernorm": True},
)
