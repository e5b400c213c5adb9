"""Where the gradients of a bucket lie: its shards, one for each rank, and the slices of parameters in them.

A slice is the part of one parameter in one shard. Each slice that is sent as codes starts a row of `BLOCK` elements,
and the last row of a slice is padded with zeros. A scale of a row then belongs to one parameter. Tensor-parallel ranks
have copies of some parameters between others that they do not share, and must quantize the copies equally.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 128
"""Elements that share a scale, as in blockwise FP8 recipes."""


class GradientSlice(NamedTuple):
    """Elements of one parameter in one shard.

    Attributes:
        start, stop: in the bucket.
        parameter: index in the bucket.
    """

    start: int
    stop: int
    parameter: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def num_rows(self) -> int:
        """Rows of its codes."""
        return -(-self.size // BLOCK)


class Shard(NamedTuple):
    """What one rank reduces of a bucket.

    Attributes:
        quantized: slices that are sent as FP8 codes.
        unquantized: slices that are sent in the dtype of the gradients.
    """

    quantized: tuple[GradientSlice, ...]
    unquantized: tuple[GradientSlice, ...]

    @property
    def num_rows(self) -> int:
        """Rows of codes."""
        return sum(slice_.num_rows for slice_ in self.quantized)

    @property
    def num_unquantized(self) -> int:
        """Elements that are not quantized."""
        return sum(slice_.size for slice_ in self.unquantized)

    @property
    def row_starts(self) -> list[int]:
        """The first element of each quantized slice in the rows of the shard."""
        return [0, *accumulate(slice_.num_rows * BLOCK for slice_ in self.quantized)][: len(self.quantized)]


def parameter_ranges(bucket: Any) -> list[tuple[int, int]]:
    """(start, stop) of the gradient of each parameter in its bucket."""
    ranges = []
    for parameter in bucket.params_list:
        # The gradients are views of the bucket's buffer: offsets in it are the places.
        gradient = parameter.main_grad
        assert gradient.untyped_storage().data_ptr() == bucket.grad_data.untyped_storage().data_ptr()
        start = gradient.storage_offset() - bucket.grad_data.storage_offset()
        ranges.append((start, start + gradient.numel()))
    return ranges


def split_bucket(
    ranges: Sequence[tuple[int, int]], is_unquantized: Sequence[bool], num_elements: int, num_shards: int
) -> list[Shard]:
    """Divide a bucket into shards of equal size, the last one possibly shorter, as a reduce-scatter does.

    Args:
        ranges: (start, stop) of each parameter. What lies between them is padding.
        is_unquantized: by parameter.
    """
    size = -(-num_elements // num_shards)
    shards = []
    # A parameter that crosses a border of shards has a slice in each.
    for low in range(0, num_shards * size, size):
        slices = [
            GradientSlice(max(start, low), min(stop, low + size), index)
            for index, (start, stop) in enumerate(ranges)
            if start < low + size and stop > low
        ]
        shards.append(
            Shard(
                tuple(slice_ for slice_ in slices if not is_unquantized[slice_.parameter]),
                tuple(slice_ for slice_ in slices if is_unquantized[slice_.parameter]),
            )
        )
    return shards


def split_shards(shards: Sequence[Shard], num_parts: int) -> list[list[Shard]]:
    """Divide the shards into parts of about the same number of rows, which can be sent one after the other.

    Slices are divided at the borders of their rows, so that the codes stay the same. The unquantized slices are in the
    first part.
    """
    parts = []
    for index in range(num_parts):
        part = []
        for shard in shards:
            # The same fraction of every shard, so that each part is a message of about the same size to each rank.
            low, high = (shard.num_rows * each // num_parts for each in (index, index + 1))
            part.append(Shard(tuple(rows_of(shard, low, high)), shard.unquantized if index == 0 else ()))
        parts.append(part)
    return parts


def rows_of(shard: Shard, low: int, high: int) -> Iterator[GradientSlice]:
    """The quantized slices of rows [low, high) of a shard."""
    first = 0
    # A slice of k rows: rows below `low` and from `high` on are cut off. The last row may be incomplete.
    for slice_ in shard.quantized:
        start = slice_.start + max(0, low - first) * BLOCK
        stop = min(slice_.stop, slice_.start + max(0, high - first) * BLOCK)
        if start < stop:
            yield GradientSlice(start, stop, slice_.parameter)
        first += slice_.num_rows


def gather_rows(gradients: Tensor, shards: Sequence[Shard], zeros: Tensor) -> Tensor:
    """The quantized elements of a bucket as [rows, BLOCK], in the order of the shards.

    Args:
        zeros: [BLOCK] in the dtype of the gradients.
    """
    parts = []
    for slice_ in (slice_ for shard in shards for slice_ in shard.quantized):
        # Slices are contiguous in the bucket; only the end of each is padded.
        parts.append(gradients[slice_.start : slice_.stop])
        if slice_.size % BLOCK:
            parts.append(zeros[: -slice_.size % BLOCK])
    flat = torch.cat(parts) if parts else gradients[:0]
    return flat.view(len(flat) // BLOCK, BLOCK)


def scatter_rows(gradients: Tensor, shard: Shard, rows: Tensor, unquantized: Tensor) -> None:
    """Write the sums of a shard into the bucket.

    Args:
        rows: [rows of the shard, BLOCK].
        unquantized: [unquantized elements of the shard].
    """
    flat = rows.view(-1)
    # Without the padding at the end of each slice.
    sources = [
        flat[start : start + slice_.size] for start, slice_ in zip(shard.row_starts, shard.quantized, strict=True)
    ]
    targets = [gradients[slice_.start : slice_.stop] for slice_ in shard.quantized]
    if targets:
        torch._foreach_copy_(targets, sources)
    scatter_unquantized(gradients, shard, unquantized)


def scatter_unquantized(gradients: Tensor, shard: Shard, unquantized: Tensor) -> None:
    """Write the sums of the elements of a shard that are not quantized into the bucket."""
    if shard.unquantized:
        targets = [gradients[slice_.start : slice_.stop] for slice_ in shard.unquantized]
        torch._foreach_copy_(targets, list(unquantized.split([slice_.size for slice_ in shard.unquantized])))
