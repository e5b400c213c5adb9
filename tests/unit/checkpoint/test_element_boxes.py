"""Runs of elements as boxes."""

from __future__ import annotations

from math import prod

import pytest
import torch

from megafp8.checkpoint.optimizer_state import Box, flat_range_boxes


@pytest.mark.parametrize("shape", [(), (7,), (4, 5), (3, 1, 4), (2, 3, 4), (1, 6)])
def test_boxes_cover_the_elements_in_order(shape: tuple[int, ...]) -> None:
    """Every run of every shape: written back at the boxes, its elements have their original positions."""
    numbers = torch.arange(prod(shape)).view(shape)
    for first in range(numbers.numel() + 1):
        for last in range(first, numbers.numel() + 1):
            run = numbers.flatten()[first:last]
            found, taken = torch.full(shape, -1), 0
            for box in flat_range_boxes(shape, first, last):
                slices = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
                found[slices] = run[taken : taken + prod(box.sizes)].view(box.sizes)
                taken += prod(box.sizes)
            inside = (numbers >= first) & (numbers < last)
            assert taken == last - first
            assert torch.equal(found, torch.where(inside, numbers, -1))


def test_the_number_of_boxes_is_small() -> None:
    assert list(flat_range_boxes((100, 10), 5, 995)) == [
        Box((0, 5), (1, 5)),
        Box((1, 0), (98, 10)),
        Box((99, 0), (1, 5)),
    ]
    assert list(flat_range_boxes((100, 10), 12, 17)) == [Box((1, 2), (1, 5))]
    assert list(flat_range_boxes((100, 10), 0, 1000)) == [Box((0, 0), (100, 10))]
