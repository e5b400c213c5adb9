"""Annotations of tensors: kernel results, such as an amax, attached to a tensor for a kernel that runs later.

A later kernel then need not read the tensor again. An annotation is an attribute of the tensor. It lives as long as the
tensor, and autograd passes it on with the tensor: from one function's backward pass to the next, and from a forward
pass to its backward pass. Transformer Engine reshapes tensors on the way; a view finds the annotation at its base.

An annotation holds for all elements, at the time of annotation. It does not apply to a slice, a sum or a copy of the
tensor, to a tensor that was written to since, or to another tensor in the same memory. Autograd's version counter
detects writes, but not those through `.data`, a storage or a kernel: do not annotate tensors that are written so.
"""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor


def annotate(tensor: Tensor, name: str, value: Tensor) -> None:
    """Attach a kernel's result to a contiguous tensor, on the stream that reads or writes the tensor.

    Args:
        tensor: complete, not a slice; the annotation of a view is kept at its base.
        name: of the annotation: `amax` is FP32 [1]; others are defined by the kernels that use them.
    """
    setattr(_base_of(tensor), f"annotation_{name}", (value, _identity(tensor)))


def annotation(tensor: Tensor, name: str) -> Optional[Tensor]:
    """The annotation of a tensor by name; None if there is none, or the tensor may have changed since."""
    value, identity = getattr(_base_of(tensor), f"annotation_{name}", (None, None))
    return value if identity is not None and tensor.is_contiguous() and _identity(tensor) == identity else None


def _base_of(tensor: Tensor) -> Tensor:
    """The tensor that a view is a view of; else the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for a contiguous tensor and its complete views, until one of them is written to."""
    return tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor._version
