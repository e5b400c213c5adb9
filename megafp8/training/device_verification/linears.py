"""Results of the device's linears compared with exact products of the same codes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from megafp8.quantization.quantize import dequantize
from megafp8.recipes import registry
from megafp8.recipes.base import OPERANDS_OF, Gemm, Operand
from megafp8.training.device_verification.casts import TO_NEAREST, failure_text, plan_of
from megafp8.training.device_verification.inputs import LINEAR_SIZES, linear_inputs
from megafp8.training.device_verification.native import NativeLayers

# A result is rounded to BF16 once: half a unit in the last place, 2^-8 relative at most.
ROUNDING = 2.0**-8
# What a tensor core drops of a sum, in units of the sum of magnitudes, for one GEMM over all lengths. Hopper keeps 14
# bits of each product with fast accumulation; a model of it and an H200 gave 6.1e-4 at most. A device that keeps more
# drops less.
DROPPED = 7e-4


@dataclass(frozen=True)
class LinearComparison:
    """One GEMM of a linear under one recipe.

    Attributes:
        sizes: tokens, inputs and outputs.
        bound_fraction: the largest difference as a fraction of its bound; above 1 the device is wrong, or its sums are
            coarser than Hopper's.
        rms_error: root mean square of the difference over the sum of magnitudes.
        failure: the message of a linear that failed, where nothing was compared.
    """

    recipe: str
    format: str
    gemm: str
    sizes: tuple[int, int, int]
    bound_fraction: float
    rms_error: float
    failure: Optional[str] = None


def exact_product(recipe: str, number_format: str, gemm: Gemm, tensors: dict[Operand, Tensor]) -> tuple[Tensor, Tensor]:
    """The product of the emulation's operands, and that of their magnitudes, in FP64."""
    plan = plan_of(registry.get(recipe).rules(number_format, TO_NEAREST))
    a, b = (dequantize(plan.quantize(tensors[operand], operand, gemm)).double() for operand in dict(OPERANDS_OF)[gemm])
    if gemm is Gemm.FPROP:
        b = b.t()
    elif gemm is Gemm.WGRAD:
        a = a.t()
    return a @ b, a.abs() @ b.abs()


def compare_linears(native: NativeLayers, recipe: str, number_format: str) -> list[LinearComparison]:
    """Compare output and both gradients of linears of all sizes."""
    found = []
    for sizes in LINEAR_SIZES:
        x, w, dy = linear_inputs(*sizes)
        try:
            results = native.linear(recipe, number_format, x, w, dy)
        except Exception as error:  # on a new device that is a result
            found.append(LinearComparison(recipe, number_format, "all", sizes, math.inf, 0.0, failure_text(error)))
            continue
        tensors = {Operand.INPUT: x, Operand.WEIGHT: w, Operand.GRAD_OUTPUT: dy}
        for gemm, result in results.items():
            exact, magnitude = exact_product(recipe, number_format, gemm, tensors)
            difference = (result.double() - exact).abs()
            fraction = (difference / (ROUNDING * exact.abs() + DROPPED * magnitude)).max().item()
            rms = (difference / magnitude).square().mean().sqrt().item()
            found.append(LinearComparison(recipe, number_format, gemm.value, sizes, fraction, rms))
    return found


def largest(comparisons: list[LinearComparison]) -> float:
    """The largest fraction of a bound; NaN counts as infinite."""
    fractions = torch.tensor([each.bound_fraction for each in comparisons], dtype=torch.float64)
    return torch.nan_to_num(fractions, nan=float("inf")).max().item() if len(fractions) else 0.0
