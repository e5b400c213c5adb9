"""What a kernel found out about a tensor, noted at the tensor for a kernel that would else have to read all of it.

A note is an attribute of the tensor, so that it lives as long, and autograd hands it on with the tensor: from one
function's backward pass to the next, and from a forward pass to its backward pass. On the way Transformer Engine
reshapes tensors: a view finds the note at what it is a view of. A note is of all elements and of the moment. What was
written to since, a part, a sum, a copy or memory that another tensor has by now is not the noted tensor, and has to be
read. Autograd's count tells of writing, so that who writes through `.data`, a storage or a kernel must not be noted of.
"""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor


def annotate(tensor: Tensor, name: str, found: Tensor) -> None:
    """Keep what a kernel finds out about a contiguous tensor, in the stream that writes or reads the tensor.

    Args:
        tensor: whole; a view's note is kept at what it is a view of.
        name: of what is found: `amax`, FP32 [1], or as who notes it says.
        found: the kernel's result.
    """
    setattr(owner_of(tensor), f"noted_{name}", (found, identity(tensor)))


def annotation(tensor: Tensor, name: str) -> Optional[Tensor]:
    """What was noted by this name of exactly these numbers; None where nothing was, or they may be others by now."""
    found, of = getattr(owner_of(tensor), f"noted_{name}", (None, None))
    return found if of is not None and tensor.is_contiguous() and identity(tensor) == of else None


def owner_of(tensor: Tensor) -> Tensor:
    """What a tensor is a view of; else itself."""
    return tensor if tensor._base is None else tensor._base


def identity(tensor: Tensor) -> tuple[Any, ...]:
    """What a contiguous tensor shares with its whole views alone, until one of them is written to (autograd counts)."""
    return tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor._version
