"""The quantization rules of linears: recipes with the options that the settings give them."""

from __future__ import annotations

import functools
from typing import Optional

from megafp8.config.precision_map import Choice, LinearChoice, base_choice
from megafp8.config.schema import PrecisionConfig
from megafp8.recipes import registry
from megafp8.recipes.base import OPERANDS_OF, LinearRecipe


def build_recipe(precision: PrecisionConfig) -> Optional[LinearRecipe]:
    """The rules of a layer's linears without a precision map, or None in high precision."""
    return build_linear_recipe(precision, base_choice(precision))


@functools.lru_cache(maxsize=64)
def build_linear_recipe(precision: PrecisionConfig, chosen: LinearChoice) -> Optional[LinearRecipe]:
    """The rules of one linear, whose GEMMs may each have another recipe; None where all are in high precision.

    Args:
        precision: has the recipes' options, such as the amax history's length.
    """
    if not chosen.is_quantized:
        return None
    if chosen == base_choice(precision):
        whole = _rules(precision, chosen.fprop)
        assert whole is not None
        return whole if precision.fp8_wgrad else whole.without_wgrad()
    parts = [_rules(precision, choice) for choice in chosen]
    rules = tuple(
        (operand, gemm, None if part is None else part.rule(operand, gemm))
        for (gemm, operands), part in zip(OPERANDS_OF, parts, strict=True)
        for operand in operands
    )
    names = [choice.recipe or "high" for choice in chosen]
    options = next((part.delayed for part in parts if part is not None and part.delayed is not None), None)
    return LinearRecipe(name="/".join(names) if len(set(names)) > 1 else names[0], rules=rules, delayed=options)


def _rules(precision: PrecisionConfig, choice: Choice) -> Optional[LinearRecipe]:
    if choice.recipe is None:
        return None
    return registry.get(choice.recipe).rules(choice.format, vars(precision))
