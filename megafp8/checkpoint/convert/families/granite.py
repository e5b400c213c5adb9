"""Granite 3 (IBM 2024), dense: Llama with multipliers of embedding, attention, residual and logits."""

from __future__ import annotations

from megafp8.checkpoint.convert.families import llama
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Heads, Rotary, SameBiases, Value

FAMILY = HFFamily(
    model_type="granite",
    architecture="GraniteForCausalLM",
    names=llama.NAMES,
    fields=(
        *llama.common_fields(positions=2048, norm_epsilon=1e-6),
        Heads(),
        Rotary(),
        SameBiases(),
        Value("embedding_multiplier", "embedding_multiplier", 1.0),
        Value("attention_multiplier", "softmax_scale", 1.0),
        Value("residual_multiplier", "residual_multiplier", 1.0),
        Value("logits_scaling", "logits_scaling", 1.0),
    ),
    settings=llama.SETTINGS,
)
