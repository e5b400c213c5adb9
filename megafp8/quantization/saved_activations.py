"""Activations as E4M3 codes with an E8M0 scale for each group of 16 elements of the last dimension.

The format and the group size are those of COAT (arXiv:2410.19313) for non-linear layers. A scale is the smallest power
of two that brings a group's amax into E4M3's range, in one byte: products with it are exact, so that the code is the
only rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.config.saved_activations import GROUP
from megafp8.quantization.quantize import decode_values_by_torch, has_kernels, quantize_by_torch
from megafp8.quantization.quantized_tensor import Quantized
from megafp8.recipes.base import OperandRule, ScaleRule
from megafp8.recipes.formats import E4M3

RULE = OperandRule(format=E4M3, block=(1, GROUP), scale_rule=ScaleRule.E8M0)
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Packed:
    """A packed tensor.

    Attributes:
        codes: E4M3, in the shape of the source.
        scales: E8M0 [rows, columns / 16], where all dims but the last are rows.
        dtype: of the source.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype


def can_pack(tensor: Tensor) -> bool:
    """Whether a tensor is a plain one of at least two dims, in BF16 or FP32, whose last dim groups divide."""
    is_plain = type(tensor) is Tensor and tensor.dtype in DTYPES
    return is_plain and tensor.ndim > 1 and tensor.numel() > 0 and tensor.shape[-1] % GROUP == 0


def pack(tensor: Tensor) -> Packed:
    """Quantize a tensor that `can_pack`: in one launch on a GPU with Triton, else in torch operations.

    NaN stays NaN, and a group with an infinity decodes to infinities or NaN where it has them.
    """
    if has_kernels(tensor):
        from megafp8.kernels.group_casts import cast_groups  # needs Triton
        from megafp8.kernels.rounding import format_spec

        codes, scales = cast_groups(tensor.contiguous(), format_spec(E4M3), GROUP)
        scales = scales.view(-1, tensor.shape[-1] // GROUP)
        return Packed(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu), tensor.dtype)
    quantized = quantize_by_torch(tensor, RULE)
    return Packed(quantized.codes, quantized.dequant_scale, tensor.dtype)


def unpack(packed: Packed) -> Tensor:
    """Codes times scales, contiguous, in the dtype of the source."""
    if has_kernels(packed.codes):
        from megafp8.kernels.group_casts import decode_groups  # needs Triton
        from megafp8.kernels.rounding import format_spec

        codes, scales = packed.codes.view(torch.uint8), packed.scales.view(torch.uint8)
        return decode_groups(codes, scales.view(-1), format_spec(E4M3), GROUP, packed.dtype)
    return decode_values_by_torch(Quantized(packed.codes, packed.scales, None, RULE), packed.dtype)
