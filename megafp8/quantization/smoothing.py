"""A scale per channel of a linear's input, as Smooth-SwiGLU has for the linear after SwiGLU (arXiv:2409.12517).

When the two weights of a SwiGLU channel align, its output grows with the square of its input. One scale for the tensor
then leaves too few of the format's numbers to the other channels. With a power of two s for each input channel,

    y = x w^T = (x / s) (w s)^T

the largest magnitude of every channel of x / s lies in [1, 2), and what is quantized has no outlier channel. Powers of
two change no bit of a product, so that y is the same in high precision, and so are both gradients: dx = (dy w s) / s,
dw = (dy^T (x / s)) s. The paper divides by its scales after the quantization and merges them into the weight for
inference. Here the weight carries them before it is quantized, because the GEMM multiplies codes.

The scales are of the rows of this rank and this microbatch; they need no communication and no state. The weight is
quantized once for each microbatch. A channel that is all zero, or has a value that is not finite, has the scale 1.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megafp8.quantization.linear_plan import LinearPlan

LARGEST = {torch.float16: 2.0**6}  # of the scales, so that products with weights and gradients keep their exponent
LARGEST_WIDE = 2.0**60  # in BF16 and FP32; the smallest are the inverse


@torch.no_grad()
def channel_scales(values: Tensor) -> Tensor:
    """The largest power of two that is at most the amax of each channel, FP32 [K].

    Args:
        values: [..., K].
    """
    amax = values.detach().reshape(-1, values.shape[-1]).abs().amax(dim=0).float()
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa 2^exponent, mantissa in [0.5, 1)
    largest = LARGEST.get(values.dtype, LARGEST_WIDE)
    scales = torch.ldexp(torch.ones_like(mantissa), exponent - 1).clamp(1 / largest, largest)
    return torch.where((amax > 0) & torch.isfinite(amax), scales, 1.0)


def smooth(input: Tensor, plan: LinearPlan) -> tuple[Tensor, LinearPlan]:
    """The input of a linear [..., K] divided by the scales of its channels, and the plan of the linear with them."""
    assert not plan.gather_input, "the channels of a gathered input have scales of their shards"
    scales = channel_scales(input)
    total = scales if plan.channel_scales is None else scales * plan.channel_scales
    return input / scales.to(input.dtype), dataclasses.replace(plan, channel_scales=total)
