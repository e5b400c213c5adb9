"""Conversion between sequences and Transformer Engine's packed format thd, around its attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def attend_packed(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> Tensor:
    """Call `attend` with the sequences of a microbatch one after the other: tensors (B * S, heads, channels)."""
    length, batch_size = query.shape[:2]
    flat = [x.transpose(0, 1).reshape(batch_size * length, *x.shape[2:]) for x in (query, key, value)]
    output = attend(*flat, *rest, **options)
    return output.view(batch_size, length, -1).transpose(0, 1).contiguous()
