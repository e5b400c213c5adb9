"""The largest magnitude of a tensor, and the scale that follows from it.

`quant_scale` multiplies a value into the range of a format; `dequant_scale` is its reciprocal in FP32.
The rules are Transformer Engine's, corner by corner (`common/recipe/recipe_common.cuh`, read at 2.20):

    amax is 0, infinite or NaN      -> quant_scale 1
    otherwise                       -> format max / amax, one IEEE FP32 division
    the division overflows          -> largest finite FP32
    power-of-two scales             -> the mantissa bits cleared, that is rounded down
"""

from __future__ import annotations

import enum
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.fp8.formats import Format

FP32_MAX = torch.finfo(torch.float32).max
FP32_SIGN_AND_EXPONENT = -(1 << 23)  # 0xFF800000 as a signed word


class ScaleRule(enum.Enum):
    """How a quant_scale is rounded."""

    FP32 = "fp32"
    POWER_OF_TWO = "power of two"


def amax(tensor: Tensor) -> Tensor:
    """Largest magnitude of a tensor, an FP32 scalar on its device.

    Numerics: exact; NaN is ignored, as the hardware's maximum ignores it; infinity counts; no element gives 0.
    """
    tensor = tensor.detach()
    if not tensor.numel():
        return torch.zeros((), dtype=torch.float32, device=tensor.device)
    if not tensor.is_cuda:  # one pass, and two more only if a NaN came out of it
        lowest, highest = (bound.item() for bound in torch.aminmax(tensor))
        if lowest <= highest:
            return torch.tensor(max(abs(lowest), abs(highest)), dtype=torch.float32)
    return tensor.abs().nan_to_num_(nan=0.0, posinf=torch.inf).amax().float()


def reduced_amax(tensor: Tensor, group: Optional[dist.ProcessGroup]) -> Tensor:
    """`amax` over the shards that the ranks of a group hold; `group` None is this rank's alone."""
    largest = amax(tensor)
    if group is not None and group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def quant_scale_of(largest: Tensor, fmt: Format, rule: ScaleRule, *, on_overflow: float = FP32_MAX) -> Tensor:
    """The factor that brings values of magnitude `largest` to the top of a format's range.

    Args:
        largest: FP32 amaxes, any shape.
        fmt: the format to scale into.
        rule: leave the quotient as it is, or round it down to a power of two.
        on_overflow: the scale where the quotient exceeds FP32 (amax below about 1e-36).

    Returns:
        FP32, same shape.
    """
    scale = torch.full_like(largest, fmt.max).div_(largest).clamp_(max=on_overflow)
    usable = (largest > 0) & (largest < torch.inf)
    scale = torch.where(usable, scale, 1.0)
    if rule is ScaleRule.POWER_OF_TWO:
        scale.view(torch.int32).bitwise_and_(FP32_SIGN_AND_EXPONENT)
    return scale
