"""A recipe is data: which format, block and scale each operand has in each GEMM.

A linear y = x w^T has three GEMMs and three operands, each operand in two of the GEMMs:

    fprop   y  = x w^T      input, weight
    dgrad   dx = dy w       grad_output, weight
    wgrad   dw = dy^T x     grad_output, input

Hence six rules. Two uses of an operand under one rule share their codes: so it is in a per-tensor recipe, and for
weights in square blocks. Other blocks lie along the summed dimension, which is another one in the second use: the
operand is quantized twice, from high precision, into rows' blocks (1 x n) and columns' blocks (n x 1).

    recipe      input, grad_output    weight          scales
    tensorwise  tensor                tensor          FP32, from the tensor at hand (or powers of two)
    delayed     tensor                tensor          FP32, from the amaxes of earlier steps
    blockwise   128 along the sum     128 x 128       powers of two (or FP32)
    mxfp8       32 along the sum      32 along it     E8M0: powers of two, in a byte
    nvfp4       16 along the sum      16 x 16         E4M3 each, under one FP32 for the tensor

Formats: E4M3 forward; grad_output E5M2 under `hybrid`, which is Transformer Engine's default for tensorwise and
delayed, and whoever asks for it gets it in blockwise and mxfp8 too, where E4M3 is usual. nvfp4 is E2M1 throughout; in
its wgrad both operands are Hadamard-transformed, and grad_output is rounded stochastically.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Optional

from megafp8.config.precision_map import Choice, LinearChoice, base_choice
from megafp8.config.schema import PrecisionConfig
from megafp8.device.capability import EMULATED_RECIPES
from megafp8.errors import CapabilityError
from megafp8.fp8.formats import E2M1, E4M3, E5M2, Format
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

Block = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class OperandRule:
    """How one operand is quantized for one GEMM.

    Attributes:
        format: of the codes.
        block: (rows, columns) of the part that shares a scale, in the tensor as [rows, columns]; None: all of it.
        scale_rule: where scales come from.
        is_transformed: Hadamard transform along the rows before anything else.
        is_stochastic: round stochastically.
    """

    format: Format
    block: Optional[Block] = None
    scale_rule: ScaleRule = ScaleRule.FP32
    is_transformed: bool = False
    is_stochastic: bool = False

    @property
    def granularity(self) -> str:
        """What shares a scale, the longer side last: blocks of columns are rows' blocks of the transposed tensor."""
        return "tensor" if self.block is None else "x".join(map(str, sorted(self.block)))

    @property
    def is_bf16_exact(self) -> bool:
        """Are the codes times their blocks' scales BF16 numbers? Scales of a whole tensor wait until after the GEMM."""
        return self.block is None or self.scale_rule is not ScaleRule.FP32

    @property
    def extras(self) -> str:
        """What happens besides scaling and rounding to nearest, in words; empty if nothing does."""
        words = ["Hadamard"] * self.is_transformed + ["stochastic rounding"] * self.is_stochastic
        return " and ".join(words)

    def __str__(self) -> str:
        extras = f", {self.extras}" if self.extras else ""
        return f"{self.format.name} per {self.granularity}, {self.scale_rule.value} scale{extras}"


@dataclass(frozen=True, kw_only=True)
class DelayedOptions:
    """How delayed scaling makes scales of amaxes.

    Attributes:
        history_len: entries of the amax history, the one under way included.
        algorithm: "max" of the history, or "most_recent".
        margin: scales are divided by 2^margin.
        is_reduced_over_data: reduce amaxes over data-parallel ranks too, not over tensor and context ranks only.
    """

    history_len: int = 1
    algorithm: str = "most_recent"
    margin: int = 0
    is_reduced_over_data: bool = True


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All rules of a recipe.

    Attributes:
        name: as `--fp8-recipe` or `--fp4-recipe` spells it; of several, one a GEMM: `tensorwise/high/high`.
        rules: (operand, GEMM, rule) for all six uses; a rule of None leaves the whole GEMM in high precision.
        delayed: with delayed scaling, its options.
    """

    name: str
    rules: tuple[tuple[Operand, Gemm, Optional[OperandRule]], ...]
    delayed: Optional[DelayedOptions] = None

    def rule(self, operand: Operand, gemm: Gemm) -> Optional[OperandRule]:
        """The rule of one use; None is high precision."""
        for each_operand, each_gemm, rule in self.rules:
            if (each_operand, each_gemm) == (operand, gemm):
                return rule
        raise KeyError(f"{operand.value} is no operand of {gemm.value}")

    @property
    def is_stochastic(self) -> bool:
        """Is any operand rounded stochastically?"""
        return any(rule is not None and rule.is_stochastic for *_, rule in self.rules)

    def is_quantized(self, gemm: Gemm) -> bool:
        """Does this GEMM multiply quantized operands?"""
        return all(self.rule(operand, gemm) is not None for operand in dict(OPERANDS_OF)[gemm])


HIGH_PRECISION = Recipe(
    name="high", rules=tuple((operand, gemm, None) for gemm, operands in OPERANDS_OF for operand in operands)
)
"""Nothing is quantized."""


class DescriptionRow(NamedTuple):
    """One line of the start-up table."""

    gemm: str
    operands: str
    granularity: str
    scale: str
    is_quantized: bool = True


# --- the recipes ------------------------------------------------------------------------------------------------------


def build_recipe(precision: PrecisionConfig) -> Optional[Recipe]:
    """The recipe that the emulated layers follow, or None in high precision.

    Raises:
        CapabilityError: the recipe is not emulated.
    """
    if precision.fp4_format is not None:
        if precision.fp4_recipe != "nvfp4":
            raise CapabilityError(f"--fp4-recipe {precision.fp4_recipe} has no rules in build_recipe")
        return nvfp4(
            transforms=precision.fp4_hadamard,
            rounds_stochastically=precision.fp4_stochastic_rounding,
            square_weights=precision.fp4_2d_weights,
        )
    if precision.fp8_format is None:
        return None
    if precision.fp8_recipe not in EMULATED_RECIPES:
        raise CapabilityError(
            f"--fp8-recipe {precision.fp8_recipe} is not emulated; give one of {', '.join(EMULATED_RECIPES)}"
        )
    forward = E5M2 if precision.fp8_format == "e5m2" else E4M3
    backward = E4M3 if precision.fp8_format == "e4m3" else E5M2
    if precision.fp8_recipe == "blockwise":
        scale_rule = ScaleRule.FP32 if precision.fp8_block_scaling_fp32_scales else ScaleRule.POWER_OF_TWO
        recipe = blockwise(forward=forward, backward=backward, scale_rule=scale_rule)
    elif precision.fp8_recipe == "delayed":
        options = DelayedOptions(
            history_len=precision.fp8_amax_history_len,
            algorithm=precision.fp8_amax_compute_algo,
            margin=precision.fp8_margin,
            is_reduced_over_data=not precision.tp_only_amax_red,
        )
        recipe = delayed(forward=forward, backward=backward, options=options)
    elif precision.fp8_recipe == "mxfp8":
        recipe = mxfp8(forward=forward, backward=backward)
    elif precision.fp8_recipe == "tensorwise":
        scale_rule = ScaleRule.POWER_OF_TWO if precision.fp8_power_2_scale else ScaleRule.FP32
        recipe = tensorwise(forward=forward, backward=backward, scale_rule=scale_rule)
    else:
        raise CapabilityError(f"--fp8-recipe {precision.fp8_recipe} has no rules in build_recipe")
    return recipe if precision.fp8_wgrad else without_wgrad(recipe)


@functools.lru_cache(maxsize=64)
def build_linear_recipe(precision: PrecisionConfig, chosen: LinearChoice) -> Optional[Recipe]:
    """The recipe of one linear, whose GEMMs may each have another; None where all are in high precision.

    Args:
        precision: has the recipes' options, such as the amax history's length.
    """
    if not chosen.is_quantized:
        return None
    if chosen == base_choice(precision):
        return build_recipe(precision)
    parts = [_build_choice(precision, choice) for choice in chosen]
    rules = tuple(
        (operand, gemm, None if part is None else part.rule(operand, gemm))
        for (gemm, operands), part in zip(OPERANDS_OF, parts, strict=True)
        for operand in operands
    )
    names = [choice.recipe or "high" for choice in chosen]
    options = next((part.delayed for part in parts if part is not None and part.delayed is not None), None)
    return Recipe(name="/".join(names) if len(set(names)) > 1 else names[0], rules=rules, delayed=options)


def _build_choice(precision: PrecisionConfig, choice: Choice) -> Optional[Recipe]:
    """One recipe in one format, with the run's options."""
    if choice.recipe is None:
        return None
    changes = {"fp8_format": choice.format, "fp8_recipe": choice.recipe, "fp4_format": None, "fp8_wgrad": True}
    if choice.recipe == "nvfp4":
        changes = {"fp8_format": None, "fp4_format": choice.format}
    return build_recipe(dataclasses.replace(precision, **changes))


def tensorwise(*, forward: Format, backward: Format, scale_rule: ScaleRule = ScaleRule.FP32) -> Recipe:
    """Current scaling: one scale per tensor, from the tensor's own amax.

    Args:
        forward: format of input and weight.
        backward: format of grad_output.
        scale_rule: FP32 scales, or powers of two.
    """
    formats = _formats(forward, backward)
    return _recipe("tensorwise", lambda operand, _: OperandRule(format=formats[operand], scale_rule=scale_rule))


def delayed(*, forward: Format, backward: Format, options: DelayedOptions) -> Recipe:
    """One scale per tensor, from the amaxes that it had before (see `delayed.py`).

    Args:
        forward: format of input and weight.
        backward: format of grad_output.
        options: history, algorithm and margin.
    """
    formats = _formats(forward, backward)
    recipe = _recipe("delayed", lambda operand, _: OperandRule(format=formats[operand], scale_rule=ScaleRule.DELAYED))
    return dataclasses.replace(recipe, delayed=options)


def blockwise(*, forward: Format, backward: Format, scale_rule: ScaleRule = ScaleRule.POWER_OF_TWO) -> Recipe:
    """DeepSeek-V3's blocks (arXiv:2412.19437, section 3.3.2) with Transformer Engine's scales.

    Args:
        forward: format of input and weight.
        backward: format of grad_output.
        scale_rule: powers of two, or FP32 scales.
    """
    formats = _formats(forward, backward)

    def rule(operand: Operand, gemm: Gemm) -> OperandRule:
        block = (128, 128) if operand is Operand.WEIGHT else along_sum(128, operand, gemm)
        return OperandRule(format=formats[operand], block=block, scale_rule=scale_rule)

    return _recipe("blockwise", rule)


def mxfp8(*, forward: Format, backward: Format) -> Recipe:
    """Blocks of 32 along what is summed, with power-of-two scales rounded up (arXiv:2506.08027).

    Args:
        forward: format of input and weight.
        backward: format of grad_output.
    """
    formats = _formats(forward, backward)

    def rule(operand: Operand, gemm: Gemm) -> OperandRule:
        return OperandRule(
            format=formats[operand], block=along_sum(32, operand, gemm), scale_rule=ScaleRule.E8M0
        )

    return _recipe("mxfp8", rule)


def nvfp4(*, transforms: bool = True, rounds_stochastically: bool = True, square_weights: bool = True) -> Recipe:
    """FP4 throughout (arXiv:2509.25149): blocks of 16, E4M3 scales under an FP32 scale of the tensor.

    Args:
        transforms: Hadamard-transform both operands of wgrad.
        rounds_stochastically: round grad_output stochastically.
        square_weights: give weights 16 x 16 blocks, so that both uses see the same values; else blocks along the sum.
    """

    def rule(operand: Operand, gemm: Gemm) -> OperandRule:
        is_square = square_weights and operand is Operand.WEIGHT
        return OperandRule(
            format=E2M1,
            block=(16, 16) if is_square else along_sum(16, operand, gemm),
            scale_rule=ScaleRule.TWO_LEVEL,
            is_transformed=transforms and gemm is Gemm.WGRAD,
            is_stochastic=rounds_stochastically and operand is Operand.GRAD_OUTPUT,
        )

    return _recipe("nvfp4", rule)


def without_wgrad(recipe: Recipe) -> Recipe:
    """The same with the weight gradient's GEMM in high precision."""
    rules = tuple((operand, gemm, None if gemm is Gemm.WGRAD else rule) for operand, gemm, rule in recipe.rules)
    return dataclasses.replace(recipe, rules=rules)


def along_sum(length: int, operand: Operand, gemm: Gemm) -> Block:
    """A block of `length` elements that one sum of the GEMM runs over.

    fprop sums over the columns of x [T, K] and w [N, K]; dgrad over the columns of dy [T, N] and the rows of w; wgrad
    over the rows of dy and x.
    """
    sums_over_rows = gemm is Gemm.WGRAD or (operand is Operand.WEIGHT and gemm is Gemm.DGRAD)
    return (length, 1) if sums_over_rows else (1, length)


def _formats(forward: Format, backward: Format) -> dict[Operand, Format]:
    return {Operand.INPUT: forward, Operand.WEIGHT: forward, Operand.GRAD_OUTPUT: backward}


def _recipe(name: str, rule: Callable[[Operand, Gemm], OperandRule]) -> Recipe:
    uses = [(operand, gemm) for gemm, operands in OPERANDS_OF for operand in operands]
    return Recipe(name=name, rules=tuple((operand, gemm, rule(operand, gemm)) for operand, gemm in uses))


# --- for people -------------------------------------------------------------------------------------------------------


def describe(recipe: Optional[Recipe]) -> list[DescriptionRow]:
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
