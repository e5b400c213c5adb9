"""An annotation is found on its tensor as autograd passes it, and on no other tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

from megafp8.kernels.annotations import annotate, annotation

SHAPE = (4, 2, 8)
AMAX = torch.tensor([3.0])


def tensor_with_amax() -> Tensor:
    tensor = torch.randn(SHAPE).bfloat16()
    annotate(tensor, "amax", AMAX)
    return tensor


def replaced(tensor: Tensor, data: Tensor) -> Tensor:
    tensor.data = data
    return tensor


def rows(tensor: Tensor) -> Tensor:
    """As Transformer Engine reshapes a gradient."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "rows": rows,
    "a view of a view": lambda x: rows(x).view(4, 16).flatten(0, -2),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "written to": lambda x: x.mul_(2),
    "written to through a view": lambda x: (rows(x)[0].zero_(), x)[1],
    "written to through what shares its count": lambda x: (x.detach().add_(1), rows(x))[1],
    "a slice": lambda x: x[:2],
    "all but its first number": lambda x: x.view(-1)[1:],
    "an expanded part": lambda x: x[:1].expand(SHAPE),
    "transposed": lambda x: x.transpose(0, 1),
    "in another order, contiguous": lambda x: rows(x.transpose(0, 1)),
    "other numbers of its bits": lambda x: x.view(torch.float16),
    "copied": torch.clone,
    "summed": lambda x: x + 0,
    "with other memory": lambda x: replaced(x, torch.zeros_like(x)),
    "with part of its memory": lambda x: replaced(x, x[:2]),
    "with its memory in another type": lambda x: replaced(x, x.view(torch.float16)),
    "never noted": torch.empty_like,
}


@pytest.mark.parametrize("kind", SAME)
def test_full_views_have_the_annotation(kind: str) -> None:
    assert annotation(SAME[kind](tensor_with_amax()), "amax") is AMAX


@pytest.mark.parametrize("kind", OTHERS)
def test_other_tensors_have_no_annotation(kind: str) -> None:
    assert annotation(OTHERS[kind](tensor_with_amax()), "amax") is None


def test_reused_memory_has_no_annotation() -> None:
    memory = torch.zeros(SHAPE)
    annotate(memory.detach(), "amax", AMAX)  # a tensor whose life ends here; its memory is reused
    assert annotation(memory, "amax") is annotation(memory.view(SHAPE), "amax") is None


def test_an_annotation_of_a_view_applies_to_its_base() -> None:
    tensor = torch.zeros(SHAPE)
    annotate(rows(tensor), "amax", AMAX)
    assert annotation(tensor, "amax") is AMAX and annotation(tensor, "other") is None
    annotate(tensor[:2], "other", AMAX)
    assert annotation(tensor, "other") is None and annotation(tensor, "amax") is AMAX


def test_tensors_without_a_version_counter_have_no_annotation() -> None:
    with torch.inference_mode():
        assert annotation(torch.zeros(SHAPE), "amax") is None


class Linear(torch.autograd.Function):
    """What it finds on its gradient goes to `found`."""

    found: list[Optional[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Linear.found.append(annotation(rows(gradient), "amax"))
        return gradient


class Noting(torch.autograd.Function):
    """A layer whose gradient is annotated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return tensor_with_amax()


@pytest.mark.parametrize(
    ("after", "is_found"),
    [
        (Noting.apply, True),
        (lambda y: Noting.apply(y) + Noting.apply(y), False),  # autograd may add to the first in place
        (lambda y: Noting.apply(y) + y, False),
        (lambda y: y * 1, False),
    ],
)
def test_autograd_passes_the_annotation_of_one_gradient(after: Callable[[Tensor], Tensor], is_found: bool) -> None:
    Linear.found.clear()
    after(Linear.apply(torch.randn(SHAPE).bfloat16().requires_grad_())).sum().backward()
    assert Linear.found == [AMAX if is_found else None]
