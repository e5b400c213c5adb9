"""Comparison of our quantized tensors with Transformer Engine's, as it stores them."""

import importlib.util

import numpy as np
import pytest
import torch
from torch import Tensor

from megafp8.quantization.quantized_tensor import Quantized
from megafp8.quantization.te_layout import as_stored

# For `pytestmark`.
NEEDS_TRANSFORMER_ENGINE = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available(),
        reason="needs Transformer Engine and a GPU",
    ),
]


def check_stored(ours: Quantized, side: str, codes: Tensor, scale_inv: Tensor) -> None:
    """Compare every code and every bit of the scales."""
    our_codes, our_scales, _ = as_stored(ours, side)
    np.testing.assert_array_equal(our_codes.numpy(), codes.numpy())
    if our_scales.ndim:
        scale_inv = scale_inv[: our_scales.shape[0], : our_scales.shape[1]]
    else:
        scale_inv = scale_inv.reshape(())
    ours_bits, their_bits = (scales.contiguous().view(torch.int32).numpy() for scales in (our_scales, scale_inv))
    np.testing.assert_array_equal(ours_bits, their_bits)
