"""Table of the precision of each GEMM, which a run prints at its start."""

from __future__ import annotations

from typing import NamedTuple, Optional

from megafp8.recipes.base import OPERANDS_OF, LinearRecipe


class DescriptionRow(NamedTuple):
    """One row of the table."""

    gemm: str
    operands: str
    granularity: str
    scale: str
    is_quantized: bool = True


def describe(recipe: Optional[LinearRecipe]) -> list[DescriptionRow]:
    """The precision of each GEMM of a linear: operand formats, granularity and scales; None is high precision."""
    rows = []
    for gemm, operands in OPERANDS_OF:
        rules = {operand.value: recipe.rule(operand, gemm) if recipe else None for operand in operands}
        quantized = {name: rule for name, rule in rules.items() if rule is not None}
        if recipe is None or len(quantized) < len(rules):
            rows.append(DescriptionRow(gemm.value, " x ".join(rules), "high precision", "-", is_quantized=False))
            continue
        described = [
            f"{name} {rule.format.name}" + (f" ({rule.extras})" if rule.extras else "")
            for name, rule in quantized.items()
        ]
        granularities = dict.fromkeys(rule.granularity for rule in quantized.values())
        scales = dict.fromkeys(rule.scale_rule.value for rule in quantized.values())
        if delayed := recipe.delayed:
            scales = {f"delayed ({delayed.algorithm} of {delayed.history_len}, margin {delayed.margin}) fp32": None}
        rows.append(DescriptionRow(gemm.value, " x ".join(described), " x ".join(granularities), " x ".join(scales)))
    return rows
