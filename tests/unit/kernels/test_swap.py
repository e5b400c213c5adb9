"""Swapping two dimensions against PyTorch's copy.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

import interpreter
import pytest
import torch
from interpreter import DEVICE

interpreter.skip_without_kernels()

from megafp8.kernels.swap import swap


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 1030), (16, 2, 4, 32), (2, 9, 7)])
def test_forward_and_backward_against_a_copy(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, device=DEVICE).bfloat16().requires_grad_()
    found = swap(tensor)
    assert found.is_contiguous() and torch.equal(found, tensor.transpose(0, 1))
    weights = torch.randn(found.shape, device=DEVICE).bfloat16()
    (gradient,) = torch.autograd.grad(found, tensor, weights)
    assert gradient.is_contiguous() and torch.equal(gradient, weights.transpose(0, 1))


def test_a_view_is_swapped() -> None:
    whole = torch.randn(6, 3, 64, device=DEVICE)
    assert torch.equal(swap(whole[..., 16:48]), whole[..., 16:48].transpose(0, 1))
