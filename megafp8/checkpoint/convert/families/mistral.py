"""Mistral 7B (Jiang et al. 2023) and its successors with the same layers: Llama, in version 0.1 with a window."""

from __future__ import annotations

from megafp8.checkpoint.convert.families import llama
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Heads, Rotary
from megafp8.checkpoint.convert.layer_fields import Window

FAMILY = HFFamily(
    model_type="mistral",
    architecture="MistralForCausalLM",
    names=llama.NAMES,
    fields=(
        *llama.common_fields(positions=4096 * 32, norm_epsilon=1e-6),
        Heads(groups=8),
        Rotary(),
        Window(width=4096),
    ),
    settings=llama.SETTINGS,
)
