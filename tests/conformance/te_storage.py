"""Comparison of our quantized tensors with Transformer Engine's, as it stores them."""

import importlib.util

import pytest
import torch
from torch import Tensor

from megafp8.quantization.quantized_tensor import Quantized
from megafp8.quantization.te_layout import StoredOperand, as_stored, find_differences

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
    differences = find_differences(as_stored(ours, side), StoredOperand(codes, scale_inv))
    assert not differences, differences
