"""SmolLM3 (Bakouch et al. 2025): Llama, in which every fourth layer has no rotary embedding."""

from __future__ import annotations

from megafp8.checkpoint.convert.families import llama
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import Fixed, Heads, Rotary, SameBiases
from megafp8.checkpoint.convert.layer_fields import LayersWithoutRope

FAMILY = HFFamily(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    names=llama.NAMES,
    fields=(
        *llama.common_fields(positions=32_768, norm_epsilon=1e-6, is_tied=True),
        Heads(groups=4),
        Rotary(base=2_000_000),
        LayersWithoutRope(),
        SameBiases(),
        Fixed("use_sliding_window", (False,)),
    ),
    settings=llama.SETTINGS,
)
