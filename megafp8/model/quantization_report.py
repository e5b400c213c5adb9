"""What each recipe does to a given tensor: quantized as the emulated layers do it, then compared with the original."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.errors import DataError
from megafp8.fp8 import hadamard
from megafp8.fp8.delayed import DelayedScale
from megafp8.fp8.quantize import Quantized, dequantize, quantize
from megafp8.fp8.rounding import cast
from megafp8.fp8.scaling import amax, quant_scale_of
from megafp8.recipes import registry
from megafp8.recipes.base import Gemm, Operand, OperandRule, ScaleRule
from megafp8.recipes.formats import Format
from megafp8.telemetry.quantization import QuantizationStats, quantization_stats

FORMATS = ("e4m3", "e5m2")
BOTH = "row, column"
# The GEMM that sums over the columns of an operand, and so quantizes along its rows; and the one that sums over rows.
GEMMS = {
    Operand.INPUT: {"row": Gemm.FPROP, "column": Gemm.WGRAD},
    Operand.WEIGHT: {"row": Gemm.FPROP, "column": Gemm.DGRAD},
    Operand.GRAD_OUTPUT: {"row": Gemm.DGRAD, "column": Gemm.WGRAD},
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One tensor under one rule.

    Attributes:
        tensor: its name.
        recipe, format: what it was quantized by.
        orientation: `row`, `column`, or both where they share their codes.
        granularity: what shares a scale, in words.
        scale_rule: where scales come from, in words.
        extras: what else is done, in words: a transform, after which the error is measured, or stochastic rounding.
    """

    tensor: str
    recipe: str
    format: str
    orientation: str
    granularity: str
    scale_rule: str
    extras: str
    stats: QuantizationStats


def inspect_tensor(
    name: str,
    tensor: Tensor,
    operand: Operand,
    recipes: Sequence[str],
    formats: Sequence[str],
    delayed_amax_ratio: float = 1.0,
) -> list[Finding]:
    """Every recipe in every format, along rows and columns.

    Args:
        tensor: FP32, BF16 or FP16, not empty; all dims but the last are rows.
        operand: what it is in a linear; weights have blocks of their own.
        recipes: of the registry.
        formats: of FORMATS; FP4 has one of its own.
        delayed_amax_ratio: delayed scaling knows only what was: the amax that its history holds, relative to the
            tensor's own. Below 1 the tensor has grown since, and saturates.

    Raises:
        DataError: a recipe cannot take the tensor's shape.
    """
    rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
    for recipe in (recipe for recipe in recipes if registry.get(recipe).code_bytes < 1):
        if rows.shape[0] % hadamard.SIZE or rows.shape[1] % 2:
            raise DataError(
                f"{name} has {rows.shape[0]} rows and {rows.shape[1]} columns: {recipe} takes rows in groups of "
                f"{hadamard.SIZE} and columns in pairs; leave it out of --recipes"
            )
    findings = []
    for recipe in recipes:
        for fmt in formats_for(recipe, formats):
            for orientation, rule in recipe_rules(recipe, fmt, operand).items():
                findings.append(
                    Finding(
                        tensor=name,
                        recipe=recipe,
                        format=rule.format.name,
                        orientation=orientation,
                        granularity=rule.granularity,
                        scale_rule=rule.scale_rule.value,
                        extras=rule.extras,
                        stats=stats_under(rows, rule, delayed_amax_ratio),
                    )
                )
    return findings


def stats_under(rows: Tensor, rule: OperandRule, delayed_amax_ratio: float = 1.0) -> QuantizationStats:
    """Quantize [rows, columns] by a rule and compare."""
    scale = _scale_from_before(rows, rule, delayed_amax_ratio)
    generator = torch.Generator(rows.device).manual_seed(0) if rule.is_stochastic else None
    quantized = quantize(rows, rule, delayed=scale, generator=generator)
    values = hadamard.transform_columns(rows) if rule.is_transformed else rows
    return quantization_stats(values, dequantize(quantized), element_scales(quantized), rule.format.max)


def element_scales(quantized: Quantized) -> Tensor:
    """The dequantization scale of each value, FP32 in the shape of the tensor: what a code of 1 would stand for."""
    ones = dataclasses.replace(quantized, codes=_code_of_one(quantized.rule.format).expand_as(quantized.codes))
    return dequantize(ones)


def _code_of_one(fmt: Format) -> Tensor:
    """Codes of 1.0, as many as share a byte."""
    return cast(torch.ones(1, fmt.codes_per_byte), fmt)


def formats_for(recipe: str, formats: Sequence[str]) -> Sequence[str]:
    """Those of the formats that a recipe has, or its own where it has none of them."""
    known = registry.get(recipe)
    return [fmt for fmt in formats if fmt in known.formats] or [known.default_format]


def recipe_rules(recipe: str, fmt: str, operand: Operand) -> dict[str, OperandRule]:
    """The rules of an operand by orientation; one entry where both are the same."""
    built = registry.get(recipe).rules(fmt)
    rules = {orientation: built.rule(operand, gemm) for orientation, gemm in GEMMS[operand].items()}
    if rules["row"] == rules["column"]:
        return {BOTH: rules["row"]}
    return rules


def _scale_from_before(rows: Tensor, rule: OperandRule, amax_ratio: float) -> DelayedScale | None:
    """The scale of delayed scaling whose history has this multiple of the tensor's amax; None for other rules."""
    if rule.scale_rule is not ScaleRule.DELAYED:
        return None
    return DelayedScale(quant_scale_of(amax(rows) * amax_ratio, rule.format, rule.scale_rule), amax=None)
