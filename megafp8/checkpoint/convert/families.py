"""Which families there are, and which one a model belongs to."""

from __future__ import annotations

from typing import Any

from megafp8.checkpoint.convert import gpt2, llama
from megafp8.checkpoint.convert.tensor_mapping import Family
from megafp8.config.schema import RunConfig
from megafp8.errors import CheckpointError

FAMILIES = (llama.FAMILY, gpt2.FAMILY)


def family_of_run(config: RunConfig) -> tuple[Family, list[str]]:
    """The family that is nearest to a run's model, and what of the model it does not have."""
    known = [(family, family.inexpressible(config)) for family in FAMILIES]
    return min(known, key=lambda each: len(each[1]))


def family_of_theirs(fields: dict[str, Any]) -> Family:
    """The family of a config.json.

    Raises:
        CheckpointError: there is none here.
    """
    kind = fields.get("model_type")
    for family in FAMILIES:
        if kind == family.model_type and "auto_map" not in fields:
            return family
    names = " and ".join(family.model_type for family in FAMILIES)
    own = " with code of its own (auto_map)" if "auto_map" in fields else ""
    raise CheckpointError(f"config.json is of a model of type {kind!r}{own}; {names} can be converted")
