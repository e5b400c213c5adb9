"""Gemma 3 (Gemma Team 2025), text only: Gemma 2 with norms of queries and keys, and other rotary bases in windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megafp8.checkpoint.convert.families import gemma2, llama
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.checkpoint.convert.fields import OptionalNumber, Rotary
from megafp8.checkpoint.convert.hf_config import HFConfig
from megafp8.checkpoint.convert.layer_fields import FULL, SLIDING, Window
from megafp8.config.schema import RunConfig

NAMES = gemma2.NAMES | {
    f"{llama.ATTENTION}q_layernorm": (f"{llama.LAYER}self_attn.q_norm",),
    f"{llama.ATTENTION}k_layernorm": (f"{llama.LAYER}self_attn.k_norm",),
}

LOCAL_BASE = 10_000  # where config.json has none


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
        return super().read(of_full) | {"model.rotary_base_local": holder.positive_int(field, LOCAL_BASE)}

    def write(self, config: RunConfig) -> dict[str, Any]:
        model = config.model
        return super().write(config) | {"rope_local_base_freq": float(model.rotary_base_local or model.rotary_base)}


FAMILY = HFFamily(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    names=NAMES,
    fields=(
        *gemma2.common_fields(positions=131_072),
        TwoRotaries(base=1_000_000, kinds=("default", "linear")),
        Window(width=4096, every=6, every_field="sliding_window_pattern", has_layer_types=True),
        OptionalNumber("attn_logit_softcapping", "attention_logit_softcapping"),
        OptionalNumber("final_logit_softcapping", "output_logit_softcapping"),
    ),
    settings=gemma2.SETTINGS | {"qk_layernorm": True},
)
