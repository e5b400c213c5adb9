"""SwiGLU and its gradient by autograd in FP64: the reference for kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu_with_gradient(inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """silu(a) b [T, W] of inputs [T, 2 W] = [a, b], and the gradient of the inputs [T, 2 W], FP64.

    Args:
        gradients: of the result, [T, W].
    """
    slow = inputs.double().requires_grad_()
    a, b = slow.chunk(2, dim=1)
    result = torch.nn.functional.silu(a) * b
    result.backward(gradients.double())
    return result.detach(), slow.grad
