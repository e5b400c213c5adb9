"""A recipe is data: which format, granularity and scale each operand has in each GEMM.

A linear y = x w^T has three GEMMs and three operands, each operand in two of the GEMMs:

    fprop   y  = x w^T      input, weight
    dgrad   dx = dy w       grad_output, weight
    wgrad   dw = dy^T x     grad_output, input

Hence six rules. In a per-tensor recipe both uses of an operand have one rule and so share their codes. In a block
recipe the blocks run along the summed dimension, which is another one in the second use: two rules, two sets of codes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, Optional

from megafp8.config.schema import PrecisionConfig
from megafp8.device.capability import EMULATED_RECIPES
from megafp8.errors import CapabilityError
from megafp8.fp8.formats import E4M3, E5M2, Format
from megafp8.fp8.scaling import ScaleRule


class Operand(enum.Enum):
    """What a linear multiplies."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


class Gemm(enum.Enum):
    """The three products of a linear."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


OPERANDS_OF = (
    (Gemm.FPROP, (Operand.INPUT, Operand.WEIGHT)),
    (Gemm.DGRAD, (Operand.GRAD_OUTPUT, Operand.WEIGHT)),
    (Gemm.WGRAD, (Operand.GRAD_OUTPUT, Operand.INPUT)),
)


class Granularity(enum.Enum):
    """The part of a tensor that shares one scale."""

    TENSOR = "tensor"


@dataclass(frozen=True, kw_only=True)
class OperandRule:
    """How one operand is quantized for one GEMM."""

    format: Format
    granularity: Granularity = Granularity.TENSOR
    scale_rule: ScaleRule = ScaleRule.FP32

    def __str__(self) -> str:
        return f"{self.format.name} per {self.granularity.value}, {self.scale_rule.value} scale"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All rules of a recipe.

    Attributes:
        name: as `--fp8-recipe` spells it.
        rules: (operand, GEMM, rule) for all six uses; a rule of None leaves the whole GEMM in high precision.
    """

    name: str
    rules: tuple[tuple[Operand, Gemm, Optional[OperandRule]], ...]

    def rule(self, operand: Operand, gemm: Gemm) -> Optional[OperandRule]:
        """The rule of one use; None is high precision."""
        for each_operand, each_gemm, rule in self.rules:
            if (each_operand, each_gemm) == (operand, gemm):
                return rule
        raise KeyError(f"{operand.value} is no operand of {gemm.value}")

    def is_quantized(self, gemm: Gemm) -> bool:
        """Does this GEMM multiply quantized operands?"""
        return all(self.rule(operand, gemm) is not None for operand in dict(OPERANDS_OF)[gemm])


class DescriptionRow(NamedTuple):
    """One line of the start-up table."""

    gemm: str
    operands: str
    granularity: str
    scale: str


def build_recipe(precision: PrecisionConfig) -> Optional[Recipe]:
    """The recipe that the emulated layers follow, or None without FP8.

    Raises:
        CapabilityError: the recipe is not emulated.
    """
    if precision.fp8_format is None:
        return None
    if precision.fp8_recipe not in EMULATED_RECIPES:
        raise CapabilityError(
            f"--fp8-recipe {precision.fp8_recipe} is not emulated (emulated: {', '.join(EMULATED_RECIPES)}). "
            f"Take --fp8-recipe {EMULATED_RECIPES[0]}, or run {precision.fp8_recipe} with Transformer Engine "
            "on a CUDA device that has it: --transformer-impl transformer_engine"
        )
    return tensorwise(
        forward=E4M3,
        backward=E5M2 if precision.fp8_format == "hybrid" else E4M3,
        scale_rule=ScaleRule.POWER_OF_TWO if precision.fp8_power_2_scale else ScaleRule.FP32,
        quantize_wgrad=precision.fp8_wgrad,
    )


def tensorwise(
    *, forward: Format, backward: Format, scale_rule: ScaleRule = ScaleRule.FP32, quantize_wgrad: bool = True
) -> Recipe:
    """Current scaling: one scale per tensor, from the tensor's own amax.

    Args:
        forward: format of input and weight.
        backward: format of grad_output.
        scale_rule: FP32 scales, or powers of two.
        quantize_wgrad: False leaves the weight gradient's GEMM in high precision.
    """
    formats = {Operand.INPUT: forward, Operand.WEIGHT: forward, Operand.GRAD_OUTPUT: backward}
    return Recipe(
        name="tensorwise",
        rules=tuple(
            (operand, gemm, _rule_or_none(formats[operand], scale_rule, gemm is not Gemm.WGRAD or quantize_wgrad))
            for gemm, operands in OPERANDS_OF
            for operand in operands
        ),
    )


def _rule_or_none(fmt: Format, scale_rule: ScaleRule, quantized: bool) -> Optional[OperandRule]:
    return OperandRule(format=fmt, scale_rule=scale_rule) if quantized else None


def describe(recipe: Optional[Recipe]) -> list[DescriptionRow]:
    """The resolved precision of each GEMM: operand formats, granularity and scale."""
    rows = []
    for gemm, operands in OPERANDS_OF:
        names = [operand.value for operand in operands]
        if recipe is None or not recipe.is_quantized(gemm):
            rows.append(DescriptionRow(gemm.value, " x ".join(names), "high precision", "-"))
            continue
        rules = [recipe.rule(operand, gemm) for operand in operands]
        rows.append(
            DescriptionRow(
                gemm.value,
                " x ".join(f"{name} {rule.format.name}" for name, rule in zip(names, rules, strict=True)),
                " x ".join(dict.fromkeys(rule.granularity.value for rule in rules)),
                " x ".join(dict.fromkeys(rule.scale_rule.value for rule in rules)),
            )
        )
    return rows
