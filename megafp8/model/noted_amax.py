"""A tensor's amax, noted by the kernel that wrote the tensor, for the cast that would else read all of it first.

The note is an attribute of the tensor, so that it lives as long, and autograd hands it on with the tensor from one
function's backward pass to the next. There Transformer Engine reshapes the gradient: a view finds the note at what it
is a view of. A note is of all elements and of the moment. What was written to since, a part, a sum, a copy or memory
that another tensor has by now is not the noted tensor, and has to be read.
"""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor


def note_amax(tensor: Tensor, amax: Tensor) -> None:
    """Keep the amax of a contiguous tensor, FP32 [1], which a kernel writes in the stream that writes the tensor."""
    tensor.noted_amax = amax, identity(tensor)  # type: ignore[attr-defined]


def noted_amax(tensor: Tensor) -> Optional[Tensor]:
    """What was noted of exactly these numbers, FP32 [1]; None where nothing was, or they may be others by now."""
    owner = tensor if tensor._base is None else tensor._base
    amax, noted = getattr(owner, "noted_amax", (None, None))
    return amax if noted is not None and tensor.is_contiguous() and identity(tensor) == noted else None


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """What a contiguous tensor shares with its whole views alone, until one of them is written to (autograd counts)."""
    return tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor._version
