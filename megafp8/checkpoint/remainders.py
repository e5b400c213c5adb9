"""FP32 master weights of which only the low half is kept beside the model's BF16 weights.

The high half is the model's own weight: the master rounded to nearest, ties away from zero. The low half counts from
-2^15, so that its sign says whether the high half was rounded up. (Transformer Engine: `store_param_remainders`.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def joined(rounded: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 master weights of BF16 weights and their int16 remainders, of any one shape; exact."""
    high = rounded.contiguous().view(torch.int16).to(torch.int32)
    return ((high << 16) + remainder.to(torch.int32)).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 master weights as BF16 weights and int16 remainders, from which `joined` makes them again, bit by bit."""
    bits = master.contiguous().view(torch.int32)
    low = bits << 16 >> 16  # with its sign
    return ((bits - low) >> 16).to(torch.int16).view(torch.bfloat16), low.to(torch.int16)
