"""An RMSNorm on a CPU that saves its input, as kernels on GPUs do."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class InputSavingRMSNorm(torch.autograd.Function):
    """RMSNorm over the last dimension, with torch's bits in the forward pass.

    torch's own on a CPU is several operations, which save the input and the normalized input in FP32. This one saves
    the input as it is, the weight, and the reciprocal standard deviations in FP32. Gradients are computed in FP32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x (..., hidden_size), weight (hidden_size,)."""
        rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of input and weight."""
        x, weight, rstd = ctx.saved_tensors
        grad = grads[0].float()
        normalized, scaled = x.float() * rstd, grad * weight.float()
        dx = rstd * (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True))
        return dx.to(x.dtype), (grad * normalized).flatten(0, -2).sum(0).to(weight.dtype), None
