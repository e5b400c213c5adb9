"""How Transformer Engine stores quantized tensors, for comparison with ours.

Codes for a sum over columns ("row") have the tensor's layout, codes for a sum over rows ("col") that of the transposed
tensor. Scales of row blocks and of column blocks have the block along the sum first. Scales of squares have the layout
of their codes. Scales may be padded.
"""

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megafp8.quantization.quantized_tensor import Quantized

# For `pytestmark`.
NEEDS_TRANSFORMER_ENGINE = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available(),
        reason="needs Transformer Engine and a GPU",
    ),
]


def as_stored(ours: Quantized, side: str) -> tuple[Tensor, Tensor]:
    """Our codes (bytes) and dequantization scales in Transformer Engine's layout.

    Args:
        ours: of a tensor [rows, columns].
        side: "row" or "col".
    """
    codes, scales = ours.codes.view(torch.uint8), ours.dequant_scale
    block = ours.rule.block
    if block == (1, 128) or (block == (128, 128) and side == "col"):
        scales = scales.t()
    return (codes.t() if side == "col" else codes).cpu(), scales.cpu()


def check_stored(ours: Quantized, side: str, codes: Tensor, scale_inv: Tensor) -> None:
    """Compare every code and every bit of the scales."""
    our_codes, our_scales = as_stored(ours, side)
    np.testing.assert_array_equal(our_codes.numpy(), codes.numpy())
    if our_scales.ndim:
        scale_inv = scale_inv[: our_scales.shape[0], : our_scales.shape[1]]
    else:
        scale_inv = scale_inv.reshape(())
    ours_bits, their_bits = (scales.contiguous().view(torch.int32).numpy() for scales in (our_scales, scale_inv))
    np.testing.assert_array_equal(ours_bits, their_bits)


def stored(tensor: Any, side: str) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] of the stored form, and scales, of one of Transformer Engine's FP8 tensors."""
    if hasattr(tensor, "_rowwise_data"):
        name = "_rowwise" if side == "row" else "_columnwise"
        codes, scale_inv = getattr(tensor, f"{name}_data"), getattr(tensor, f"{name}_scale_inv")
    else:
        codes, scale_inv = tensor._data if side == "row" else tensor._transpose, tensor._scale_inv
    codes = codes.detach().view(torch.uint8)
    codes = codes.reshape(-1, codes.shape[-1]) if side == "row" else codes.reshape(codes.shape[0], -1)
    return codes.cpu(), scale_inv.detach().float().cpu()
