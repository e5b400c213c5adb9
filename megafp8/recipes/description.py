"""Rules in words: the table of GEMMs that a dry run and the start of a run print."""

from __future__ import annotations

from typing import NamedTuple, Optional

from megafp8.recipes.base import OPERANDS_OF, DelayedOptions, LinearRecipe, OperandRule


class DescriptionRow(NamedTuple):
    """One line of the table."""

    gemm: str
    operands: str
    granularity: str
    scale: str
    is_quantized: bool = True


def describe(recipe: Optional[LinearRecipe]) -> list[DescriptionRow]:
    """The resolved precision of each GEMM: operand formats, granularity and scale."""
    rows = []
    for gemm, operands in OPERANDS_OF:
        names = [operand.value for operand in operands]
        if recipe is None or not recipe.is_quantized(gemm):
            rows.append(DescriptionRow(gemm.value, " x ".join(names), "high precision", "-", is_quantized=False))
            continue
        rules = [recipe.rule(operand, gemm) for operand in operands]
        rows.append(
            DescriptionRow(
                gemm.value,
                " x ".join(_describe_operand(name, rule) for name, rule in zip(names, rules, strict=True)),
                " x ".join(dict.fromkeys(rule.granularity for rule in rules)),
                " x ".join(dict.fromkeys(_describe_scale(rule, recipe.delayed) for rule in rules)),
            )
        )
    return rows


def _describe_scale(rule: OperandRule, delayed: Optional[DelayedOptions]) -> str:
    if delayed is None:
        return rule.scale_rule.value
    return f"delayed ({delayed.algorithm} of {delayed.history_len}, margin {delayed.margin}) fp32"


def _describe_operand(name: str, rule: OperandRule) -> str:
    return f"{name} {rule.format.name}" + (f" ({rule.extras})" if rule.extras else "")
