"""How Transformer Engine stores quantized tensors, for comparison with ours. It is not imported here.

Every tensor has codes for a sum over columns ("row") and for a sum over rows ("col"). Row codes have the layout of the
tensor. Column codes have that of the transposed tensor, except under MXFP8, whose column codes are not transposed.

    scales             row codes                         column codes
    one for a tensor   FP32 scalar                       the same
    1 x 128 blocks     FP32 [K / 128, M]                 FP32 [M / 128, K]
    128 x 128 blocks   FP32 [M / 128, K / 128]           FP32, transposed
    MXFP8              E8M0 [M, K / 32]                  E8M0 [M / 32, K]
    NVFP4              E4M3 [M, K / 16]                  E4M3 [K, M / 16]

Where FP8 GEMMs read any layout (compute capability 10), one scale for a tensor means one set of codes: the column side
has no codes of its own. Scales may be padded at the end of both dimensions. NVFP4's 16 x 16 blocks repeat their scale
for each row of codes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from megafp8.quantization import nvfp4
from megafp8.quantization.quantized_tensor import Quantized
from megafp8.recipes.base import ScaleRule
from megafp8.recipes.formats import E2M1

ROW, COLUMN = "row", "col"
NVFP4_AMAX_RANGE = 448.0 * 6.0  # amax over tensor scale: the largest E4M3 scale times the largest E2M1 value


class StoredOperand(NamedTuple):
    """One side of a quantized tensor, on the CPU.

    Attributes:
        codes: uint8, one code per byte, E2M1 in the upper half of it.
        scales: dequantization scales, FP32, or E8M0 and E4M3 as uint8.
        tensor_scale: FP32 scalar of two-level scaling; None otherwise.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Optional[Tensor] = None


def as_stored(ours: Quantized, side: str) -> StoredOperand:
    """Our codes and scales in Transformer Engine's layout.

    Args:
        ours: of a tensor [M, K].
        side: "row" or "col".
    """
    block, scale_rule = ours.rule.block, ours.rule.scale_rule
    is_column = side == COLUMN
    codes = nvfp4.unpack(ours.codes) if ours.rule.format == E2M1 else ours.codes.view(torch.uint8)
    scales = ours.dequant_scale
    if scale_rule is ScaleRule.E8M0:
        return StoredOperand(codes.cpu(), scales.view(torch.uint8).cpu())
    if scale_rule is ScaleRule.TWO_LEVEL:
        assert block is not None and block[0] is not None
        scales = scales.view(torch.uint8)
        if block[0] == block[1]:
            scales = scales.repeat_interleave(block[0], dim=1 if is_column else 0)
        scales = scales.t() if is_column else scales
    elif block == (1, 128) or (block == (128, 128) and is_column):
        scales = scales.t()
    tensor_scale = None if ours.tensor_scale is None else ours.tensor_scale.cpu()
    return StoredOperand((codes.t() if is_column else codes).cpu(), scales.cpu(), tensor_scale)


def stored(tensor: Any, side: str) -> StoredOperand:
    """One side of one of Transformer Engine's quantized tensors; codes as rows of a matrix.

    Raises:
        ValueError: the side has no codes, or its scales are in the order of a GEMM's reads.
    """
    tensor_scale = None
    if getattr(tensor, "_with_gemm_swizzled_scales", False):
        raise ValueError("scales are swizzled for a GEMM, so that they cannot be compared")
    if hasattr(tensor, "_rowwise_data"):
        name = "_rowwise" if side == ROW else "_columnwise"
        codes, scales = getattr(tensor, f"{name}_data"), getattr(tensor, f"{name}_scale_inv")
    else:
        name, scales = "", tensor._scale_inv
        codes = tensor._data if side == ROW else tensor._transpose
        if codes is None and tensor._data is not None:  # the GEMM reads the other side's
            data = tensor._data
            codes = data.reshape(-1, data.shape[-1]).t()
    if codes is None or scales is None:
        raise ValueError(f"the {side} side has no codes or no scales")
    codes, scales = codes.detach().view(torch.uint8), scales.detach()
    if hasattr(tensor, "_amax_rowwise"):
        codes = nvfp4.unpack(codes)
        tensor_scale = getattr(tensor, f"_amax{name}").detach().float().cpu().reshape(()) / NVFP4_AMAX_RANGE
    has_bytes = scales.element_size() == 1
    is_transposed = side == COLUMN and not (has_bytes and tensor_scale is None)  # MXFP8 is not
    codes = codes.reshape(codes.shape[0], -1) if is_transposed else codes.reshape(-1, codes.shape[-1])
    scales = scales.view(torch.uint8) if has_bytes else scales.float()
    return StoredOperand(codes.cpu(), scales.cpu(), tensor_scale)


def find_differences(ours: StoredOperand, theirs: StoredOperand) -> dict[str, tuple[int, str]]:
    """How many codes and scales differ in any bit; empty if none does. Padding of their scales is not compared.

    Returns:
        By "codes", "scales" and "tensor scale" the number, and the first difference as text: its position in the stored
        order, and both values in hexadecimal.
    """
    if ours.codes.shape != theirs.codes.shape:
        return {"codes": (ours.codes.numel(), _shapes(ours.codes, theirs.codes))}
    scales = theirs.scales
    scales = scales[: ours.scales.shape[0], : ours.scales.shape[1]] if ours.scales.ndim else scales.reshape(())
    if scales.shape != ours.scales.shape or scales.dtype != ours.scales.dtype:
        return {"scales": (ours.scales.numel(), _shapes(ours.scales, scales))}
    pairs = {"codes": (ours.codes, theirs.codes), "scales": (ours.scales, scales)}
    if ours.tensor_scale is not None and theirs.tensor_scale is not None:
        pairs["tensor scale"] = (ours.tensor_scale, theirs.tensor_scale)
    found = {name: _first_difference(*pair) for name, pair in pairs.items()}
    if (ours.tensor_scale is None) != (theirs.tensor_scale is None):
        found["tensor scale"] = (1, "only one of the two has one")
    return {name: difference for name, difference in found.items() if difference[0]}


def _shapes(ours: Tensor, theirs: Tensor) -> str:
    ours_text, theirs_text = (f"{each.dtype} {list(each.shape)}" for each in (ours, theirs))
    return f"{theirs_text} instead of {ours_text}"


def _first_difference(ours: Tensor, theirs: Tensor) -> tuple[int, str]:
    if ours.dtype == torch.float32:
        ours, theirs = (each.contiguous().view(torch.int32) for each in (ours, theirs))
    positions = (ours != theirs).nonzero()
    if not len(positions):
        return 0, ""
    position = tuple(positions[0].tolist())
    mask, digits = (0xFF, 2) if ours.element_size() == 1 else (0xFFFFFFFF, 8)
    got, expected = (f"{int(each[position].item()) & mask:0{digits}x}" for each in (theirs, ours))
    return len(positions), f"first at {list(position)}: {got} instead of {expected}"
