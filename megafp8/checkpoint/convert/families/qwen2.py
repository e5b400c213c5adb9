"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases of queries, keys and values."""

from __future__ import annotations

from megafp8.checkpoint.convert.families import llama
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Heads, Rotary
from megafp8.checkpoint.convert.layer_fields import Window

WINDOW = Window(width=4096, switch="use_sliding_window", first_field="max_window_layers", has_layer_types=True)

FAMILY = HFFamily(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    names=llama.NAMES,
    fields=(
        *llama.common_fields(positions=32_768, norm_epsilon=1e-6),
        Heads(groups=32),
        Rotary(),
        WINDOW,
    ),
    settings=llama.SETTINGS | {"add_qkv_bias": True},
)
