"""The supported families of Hugging Face models."""

from __future__ import annotations

from typing import Any

from megafp8.checkpoint.convert import gpt2, llama
from megafp8.checkpoint.convert.tensor_mapping import HFFamily
from megafp8.config.schema import RunConfig
from megafp8.errors import CheckpointError

FAMILIES = (llama.FAMILY, gpt2.FAMILY)


def family_of_run(config: RunConfig) -> tuple[HFFamily, list[str]]:
    """Return the family closest to a run's model, and the features of the model that it does not support."""
    candidates = [(family, family.unsupported_features(config)) for family in FAMILIES]
    return min(candidates, key=lambda candidate: len(candidate[1]))


def family_of_hf_config(fields: dict[str, Any]) -> HFFamily:
    """Return the family of a config.json.

    Raises:
        CheckpointError: it is not supported.
    """
    model_type = fields.get("model_type")
    for family in FAMILIES:
        if model_type == family.model_type and "auto_map" not in fields:
            return family
    names = " and ".join(family.model_type for family in FAMILIES)
    own = " with code of its own (auto_map)" if "auto_map" in fields else ""
    raise CheckpointError(f"config.json is of a model of type {model_type!r}{own}; {names} can be converted")
