"""The supported families of Hugging Face models."""

from __future__ import annotations

from typing import Any, Optional

from megafp8.checkpoint.convert.families import deepseek, gemma, gpt, llama, mixtures
from megafp8.checkpoint.convert.family import HFFamily
from megafp8.config.schema import ModelConfig
from megafp8.errors import CheckpointError

# A run is exported as the first family that supports its model.
FAMILIES = (
    llama.LLAMA,
    llama.QWEN2,
    llama.QWEN3,
    llama.MISTRAL,
    llama.SMOLLM3,
    llama.OLMO2,
    llama.GRANITE,
    llama.PHI3,
    gemma.GEMMA2,
    gemma.GEMMA3,
    gpt.STARCODER2,
    gpt.GPT_NEOX,
    mixtures.MIXTRAL,
    mixtures.QWEN3_MOE,
    mixtures.OLMOE,
    deepseek.DEEPSEEK_V2,
    deepseek.DEEPSEEK_V3,
    gpt.GPT2,
)
MODEL_TYPES = tuple(family.model_type for family in FAMILIES)


def family_of_model(model: ModelConfig, model_type: Optional[str] = None) -> tuple[HFFamily, list[str]]:
    """Return the family closest to a model, and the features of the model that it does not support.

    Args:
        model_type: the family to take; None is the first that supports most.

    Raises:
        CheckpointError: there is no such family.
    """
    if model_type is not None and model_type not in MODEL_TYPES:
        raise CheckpointError(f"--model-type {model_type}: the families are {', '.join(MODEL_TYPES)}")
    allowed = [family for family in FAMILIES if model_type in (None, family.model_type)]
    candidates = [(family, family.unsupported_features(model)) for family in allowed]
    return min(candidates, key=lambda candidate: len(candidate[1]))


def family_of_hf_config(fields: dict[str, Any]) -> HFFamily:
    """Return the family of a config.json.

    A folder may have code beside a class that transformers has itself, as those of Phi-3 and Phi-4 do. transformers
    does not read that code unless it is trusted.

    Raises:
        CheckpointError: it is not supported, or the code may be another model.
    """
    model_type, has_own_code = fields.get("model_type"), bool(fields.get("auto_map"))
    for family in FAMILIES:
        if model_type == family.model_type and not (
            has_own_code and fields.get("architectures") != [family.architecture]
        ):
            return family
    own = " with code of its own (auto_map)" if has_own_code else ""
    raise CheckpointError(
        f"config.json is of a model of type {model_type!r}{own}; {', '.join(MODEL_TYPES)} can be converted"
    )
