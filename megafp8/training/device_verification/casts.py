"""Casts of the device compared with the emulation's: every code and every scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

import torch

from megafp8.quantization.delayed_scaling import DelayedState
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.quantization.quantized_tensor import Quantized
from megafp8.quantization.te_layout import COLUMN, ROW, StoredOperand, as_stored, find_differences
from megafp8.recipes import registry
from megafp8.recipes.base import OPERANDS_OF, Gemm, LinearRecipe, Operand
from megafp8.training.device_verification.inputs import CAST_SHAPES, MANY_SIZES, cast_inputs
from megafp8.training.device_verification.native import NativeLayers

# Random numbers differ between libraries, so that gradients are rounded to nearest.
TO_NEAREST = {"fp4_stochastic_rounding": False}


@dataclass(frozen=True)
class CastComparison:
    """Casts of one recipe in one format.

    Attributes:
        compared: number of casts: operands, sides and inputs.
        differing: a line for each cast that differs, with the position of its first difference, or that failed.
    """

    recipe: str
    format: str
    compared: int
    differing: tuple[str, ...]


def plan_of(recipe: LinearRecipe, device: str = "cpu") -> LinearPlan:
    """The plan of a linear's first step, where delayed scales are 1."""
    if recipe.delayed is None:
        return LinearPlan(recipe=recipe)
    return LinearPlan(recipe=recipe, delayed=DelayedState(recipe).to(device).scales_for_forward()[0])


def side_of(operand: Operand, gemm: Gemm) -> str:
    """The side of an operand that a GEMM reads."""
    sums_over_rows = gemm is Gemm.WGRAD or (gemm is Gemm.DGRAD and operand is Operand.WEIGHT)
    return COLUMN if sums_over_rows else ROW


def compare_casts(native: NativeLayers, recipe: str, number_format: str) -> CastComparison:
    """Compare both sides of all operands of a recipe for all inputs."""
    plan = plan_of(registry.get(recipe).rules(number_format, TO_NEAREST))
    uses = [(operand, gemm) for gemm, operands in OPERANDS_OF for operand in operands]
    compared, differing = 0, []
    for shape in CAST_SHAPES:
        for name, tensor in cast_inputs(shape):
            theirs = {operand: cast_or_failure(native, recipe, number_format, operand, tensor) for operand in Operand}
            for operand, gemm in uses:
                compared += 1
                text = difference_text(plan.quantize(tensor, operand, gemm), theirs[operand], side_of(operand, gemm))
                if text:
                    differing.append(f"{operand.value} for {gemm.value}, {shape[0]} x {shape[1]}, {name}: {text}")
    return CastComparison(recipe, number_format, compared, tuple(differing))


Sides = Union[dict[str, StoredOperand], str]
"""Both sides of a quantized tensor, or why there are none."""


def cast_or_failure(
    native: NativeLayers, recipe: str, number_format: str, operand: Operand, tensor: torch.Tensor
) -> Sides:
    """The device's cast, or the message of what it raised: on a new device that is a result."""
    try:
        return native.cast(recipe, number_format, operand, tensor)
    except Exception as error:
        return f"failed: {failure_text(error)}"


def failure_text(error: Exception) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def difference_text(ours: Quantized, theirs: Sides, side: str) -> str:
    """What differs on one side, with the first position; empty if nothing does."""
    if isinstance(theirs, str):
        return theirs
    found = find_differences(as_stored(ours, side), theirs[side])
    return ", ".join(f"{number} {what} ({first})" for what, (number, first) in found.items())


def compare_devices(recipe: str, number_format: str, device: str) -> CastComparison:
    """Compare the emulation on a device with the emulation on the CPU.

    Left out are operands that the recipe always rounds stochastically, because random numbers of two devices differ,
    and the Hadamard transform of rows of many sizes, whose sums depend on the order of additions.
    """
    rules = registry.get(recipe).rules(number_format, TO_NEAREST)
    plans = plan_of(rules), plan_of(rules, device)
    uses = [(operand, gemm, rules.rule(operand, gemm)) for gemm, operands in OPERANDS_OF for operand in operands]
    compared, differing = 0, []
    for shape in CAST_SHAPES:
        for name, tensor in cast_inputs(shape):
            for operand, gemm, rule in uses:
                if rule is not None and (rule.is_stochastic or (rule.is_transformed and name == MANY_SIZES)):
                    continue
                compared += 1
                ours, others = (
                    plan.quantize(each, operand, gemm).tensors
                    for plan, each in zip(plans, (tensor, tensor.to(device)), strict=True)
                )
                pairs = [(a, b.cpu()) for a, b in zip(ours, others, strict=True) if a is not None and b is not None]
                if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in map(as_vectors, pairs)):
                    differing.append(f"{operand.value} for {gemm.value}, {shape[0]} x {shape[1]}, {name}")
    return CastComparison(recipe, number_format, compared, tuple(differing))


def as_vectors(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors as contiguous vectors, whose bytes can be viewed."""
    return pair[0].contiguous().reshape(-1), pair[1].contiguous().reshape(-1)
