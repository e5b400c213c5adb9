"""Inputs of a linear that arrive as codes: quantized where the tokens are, multiplied where their expert is.

The tokens of an expert come from several ranks, and have one scale. Current scaling takes it from the amaxes of all
ranks; delayed scaling has it already, on the rank of the expert. Codes and scale are then those that the linear would
have made of the tokens itself, so that a run is the same to the bit.

Between the exchange and the linear the codes are held as the numbers that they stand for, in the dtype of the tokens,
which has every number of an FP8 format. They are the tokens times the scale, but their gradient is that of the tokens:
the derivative of the rounding is taken to be 1, as everywhere in quantized linears.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.quantization.counters import NON_FINITE
from megafp8.quantization.quantize import decode_operand
from megafp8.quantization.quantized_tensor import Decoded, Quantized, Use, matrix_shape
from megafp8.quantization.rounding import CODE_DTYPES, cast
from megafp8.quantization.scaling import current_scale_of, reduce_amax
from megafp8.recipes.base import OperandRule


class PrequantizedScale(NamedTuple):
    """The scale of codes that arrived.

    Attributes:
        amax: FP32 scalar, of the tokens of all ranks.
        dequant_scale: FP32 scalar.
    """

    amax: Tensor
    dequant_scale: Tensor


def amax_of_experts(rows: Tensor, expert_of_row: Tensor, num_experts: int) -> Tensor:
    """The amax of each expert's rows, FP32 [E]; NaN is ignored, infinity is not.

    Args:
        rows: [R, K].
        expert_of_row: int64 [R].
    """
    amaxes = rows.detach().abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax(dim=1).float()
    return amaxes.new_zeros(num_experts).scatter_reduce_(0, expert_of_row, amaxes, "amax")


def codes_of_experts(
    rows: Tensor,
    counts: Tensor,
    rule: OperandRule,
    group: Optional[dist.ProcessGroup] = None,
    quant_scales: Optional[Tensor] = None,
) -> tuple[Tensor, PrequantizedScale]:
    """Quantize rows with the scale of their expert. All ranks of the group call it.

    Args:
        rows: [R, K], ordered by experts.
        counts: int64 [E], rows of each expert.
        group: the ranks whose rows of an expert share a scale; None is this rank alone.
        quant_scales: FP32 [E], of delayed scaling; None computes them from the rows.

    Returns:
        Codes [R, K], and FP32 [E] amaxes and dequantization scales.

    Numerics: as `quantize`, one FP32 product and one rounding.
    """
    rows = rows.detach()
    experts = torch.arange(len(counts), device=rows.device)
    expert_of_row = experts.repeat_interleave(counts.to(rows.device), output_size=len(rows))
    amax = reduce_amax(amax_of_experts(rows, expert_of_row, len(counts)), group)
    scales = current_scale_of(amax, rule) if quant_scales is None else quant_scales
    codes = cast(rows.float() * scales[expert_of_row][:, None], rule.format)
    return codes, PrequantizedScale(amax, scales.reciprocal())


def prequantized_operand(
    numbers: Tensor, scale: PrequantizedScale, use: Use, counts: Optional[Tensor]
) -> Quantized | Decoded:
    """The operand of a GEMM from the numbers of codes that arrived.

    Args:
        counts: to which NaN, and an infinite amax as one value, are added. Infinite tokens arrive as finite codes.
    """
    rule = use.rule.for_shape(matrix_shape(numbers))
    codes = numbers.detach().to(CODE_DTYPES[rule.format.name])
    if counts is not None:
        counts[NON_FINITE] += torch.count_nonzero(numbers.isnan()) + scale.amax.isinf()
    quantized = Quantized(codes, scale.dequant_scale, None, rule)
    return quantized if use.dtype is None else decode_operand(quantized, use.dtype)


def dequantized(numbers: Tensor, scale: PrequantizedScale) -> Tensor:
    """The tokens that codes represent, for a GEMM in high precision."""
    return _Dequantize.apply(numbers, scale.dequant_scale)


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, dequant_scale: Tensor) -> Tensor:
        return (numbers.float() * dequant_scale).to(numbers.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
