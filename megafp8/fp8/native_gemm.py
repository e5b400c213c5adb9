"""GEMMs of codes with a scale a row and a column, by Hopper's tensor cores (torch's `scaled_mm`).

    product [M, N] = diag(a_scale) (a [M, K] . b [K, N]) diag(b_scale)

Scales along the sum come out of it, so the tensor core multiplies codes and its epilogue the scales. Both operands must
lie along the sum in memory: a by rows, b by columns.

Numerics: products are exact. With `is_fast` all of a sum stays in the tensor core, which keeps about 14 bits of it;
else parts of it are added in FP32. Transformer Engine has the same choice, and takes the fast one in fprop alone.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from megafp8.fp8.quantize import Quantized
from megafp8.recipes.base import OPERANDS_OF, WHOLE, Gemm, LinearRecipe, along_sum
from megafp8.recipes.formats import E5M2

CAPABILITY = (9, 0)
"""The compute capability that this was tried on."""


def multiplies_codes(recipe: LinearRecipe, gemm: Gemm, activation: Tensor) -> bool:
    """Are the codes of this GEMM multiplied as they are? Else they are decoded first."""
    if not activation.is_cuda or activation.dtype != torch.bfloat16:
        return False
    if torch.cuda.get_device_capability(activation.device) != CAPABILITY:
        return False
    rules = [(operand, recipe.rule(operand, gemm)) for operand in dict(OPERANDS_OF)[gemm]]
    has_scales_along_sum = all(rule.block == along_sum(WHOLE, operand, gemm) for operand, rule in rules)
    return has_scales_along_sum and not all(rule.format is E5M2 for _, rule in rules)


def rows_along_sum(quantized: Quantized) -> tuple[Tensor, Tensor]:
    """(codes [M, K] by rows, scale [M, 1]) of the first operand of fprop and dgrad."""
    codes = quantized.codes
    return codes.reshape(-1, codes.shape[-1]).contiguous(), quantized.dequant_scale


def transposed(operand: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """An operand's codes and scales transposed."""
    return operand[0].t(), operand[1].t()


def columns_along_sum(quantized: Quantized) -> tuple[Tensor, Tensor]:
    """(codes [K, N] by columns, scale [1, N]) of the second operand of dgrad and wgrad."""
    codes = quantized.codes.reshape(-1, quantized.codes.shape[-1])
    return codes.t().contiguous().t(), quantized.dequant_scale


def multiply(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, *, bias: Optional[Tensor] = None,
    is_fast: bool = False,
) -> Tensor:  # fmt: skip
    """The product [M, N] of codes a [M, K] and b [K, N] with their scales, in BF16 or FP32.

    Args:
        a: as `rows_along_sum` gives it; K and N are multiples of 16.
        b: as `columns_along_sum` gives it, or such an operand `transposed`.
        bias: BF16 [N].
        is_fast: sums stay in the tensor core.
    """
    scales = a[1].contiguous(), b[1].contiguous()
    return torch._scaled_mm(a[0], b[0], *scales, bias=bias, out_dtype=dtype, use_fast_accum=is_fast)
