"""Kernels that cast a tensor to FP8 with an E8M0 scale for each group of consecutive elements, and back.

    cast      read the tensor; its codes, and a byte for each group
    decode    the other way

One launch each. Bytes for each BF16 number in groups of 16: 2 and 1 1/16. A program has BLOCK_SIZE groups, whose
elements are contiguous in memory. The codes and scales are those of `quantize.quantize_by_torch` with blocks
(1, group).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.rounding import (
    FormatSpec,
    cast_to_code,
    e8m0_scales,
    e8m0_value,
    value_of_code,
    widen,
    without_nan,
)

BLOCK_SIZE = 256


@triton.jit
def elements_of(groups, GROUP: tl.constexpr):
    """Offsets [BLOCK_SIZE, GROUP] of the elements of groups, int64: tensors may have more than 2^31 elements."""
    return groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def cast_groups_kernel(
    inputs, codes, scales, num_groups, FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    groups = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = groups < num_groups
    # Groups are contiguous and complete, so that one mask over groups is enough.
    at = elements_of(groups, GROUP)
    x = widen(tl.load(inputs + at, mask=inside[:, None], other=0.0))
    # A group of zeros or NaN has the amax 0; `e8m0_scales` gives it a finite scale.
    quant_scale, _, scale_codes = e8m0_scales(without_nan(tl.max(tl.abs(x), axis=1)), False, FORMAT)
    tl.store(codes + at, cast_to_code(x * quant_scale[:, None], FORMAT), mask=inside[:, None])
    tl.store(scales + groups, scale_codes, mask=inside)


@triton.jit
def decode_groups_kernel(
    codes, scales, outputs, num_groups, FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    groups = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = groups < num_groups
    at = elements_of(groups, GROUP)
    # Masked groups decode zeros with the smallest scale, and are not stored.
    values = value_of_code(tl.load(codes + at, mask=inside[:, None], other=0).to(tl.int32), FORMAT)
    dequant_scale = e8m0_value(tl.load(scales + groups, mask=inside, other=0).to(tl.int32))
    outputs_of = outputs.dtype.element_ty
    tl.store(outputs + at, (values * dequant_scale[:, None]).to(outputs_of), mask=inside[:, None])


def cast_groups(inputs: Tensor, spec: FormatSpec, group: int) -> tuple[Tensor, Tensor]:
    """Cast a tensor in groups along its last dimension.

    Args:
        inputs: BF16, FP16 or FP32, contiguous, not empty; its last dimension is a multiple of `group`.
        spec: E4M3 or E5M2.
        group: elements of a group, a power of two.

    Returns:
        Codes, uint8 in the shape of `inputs`, and the E8M0 bytes, uint8 [elements / group].
    """
    num_groups = inputs.numel() // group
    codes = torch.empty(inputs.shape, dtype=torch.uint8, device=inputs.device)
    scales = torch.empty(num_groups, dtype=torch.uint8, device=inputs.device)
    cast_groups_kernel[(triton.cdiv(num_groups, BLOCK_SIZE),)](
        inputs, codes, scales, num_groups, FORMAT=spec, GROUP=group, BLOCK_SIZE=BLOCK_SIZE, enable_fp_fusion=False
    )
    return codes, scales


def decode_groups(codes: Tensor, scales: Tensor, spec: FormatSpec, group: int, dtype: torch.dtype) -> Tensor:
    """The values of codes and scales from `cast_groups`, rounded to `dtype`."""
    outputs = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    num_groups = scales.numel()
    decode_groups_kernel[(triton.cdiv(num_groups, BLOCK_SIZE),)](
        codes, scales, outputs, num_groups, FORMAT=spec, GROUP=group, BLOCK_SIZE=BLOCK_SIZE, enable_fp_fusion=False
    )
    return outputs
