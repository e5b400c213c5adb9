"""Where the gradients of a bucket lie: its shards, one for each rank, and the pieces of parameters in them.

A piece is the part of one parameter in one shard. Each piece that is sent as codes starts a row of `ROW` elements, and
the last row of a piece is padded with zeros. A scale of a row then belongs to one parameter. Tensor-parallel ranks have
copies of some parameters between others that they do not share, and must quantize the copies equally.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROW = 128
"""Elements that share a scale, as in blockwise FP8 recipes."""


class Piece(NamedTuple):
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
        return -(-self.size // ROW)


class Shard(NamedTuple):
    """What one rank reduces of a bucket.

    Attributes:
        coded: pieces that are sent as FP8 codes.
        exact: pieces that are sent in the dtype of the gradients.
    """

    coded: tuple[Piece, ...]
    exact: tuple[Piece, ...]

    @property
    def num_rows(self) -> int:
        """Rows of codes."""
        return sum(piece.num_rows for piece in self.coded)

    @property
    def num_exact(self) -> int:
        """Elements that are not coded."""
        return sum(piece.size for piece in self.exact)

    @property
    def row_starts(self) -> list[int]:
        """The first element of each coded piece in the rows of the shard."""
        return [0, *accumulate(piece.num_rows * ROW for piece in self.coded)][: len(self.coded)]


def parameter_ranges(bucket: Any) -> list[tuple[int, int]]:
    """(start, stop) of the gradient of each parameter in its bucket."""
    ranges = []
    for parameter in bucket.params_list:
        gradient = parameter.main_grad
        assert gradient.untyped_storage().data_ptr() == bucket.grad_data.untyped_storage().data_ptr()
        start = gradient.storage_offset() - bucket.grad_data.storage_offset()
        ranges.append((start, start + gradient.numel()))
    return ranges


def split_bucket(
    ranges: Sequence[tuple[int, int]], is_exact: Sequence[bool], num_elements: int, num_shards: int
) -> list[Shard]:
    """Divide a bucket into shards of equal size, the last one possibly shorter, as a reduce-scatter does.

    Args:
        ranges: (start, stop) of each parameter. What lies between them is padding.
        is_exact: by parameter.
    """
    size = -(-num_elements // num_shards)
    shards = []
    for low in range(0, num_shards * size, size):
        pieces = [
            Piece(max(start, low), min(stop, low + size), index)
            for index, (start, stop) in enumerate(ranges)
            if start < low + size and stop > low
        ]
        shards.append(
            Shard(
                tuple(piece for piece in pieces if not is_exact[piece.parameter]),
                tuple(piece for piece in pieces if is_exact[piece.parameter]),
            )
        )
    return shards


def split_shards(shards: Sequence[Shard], num_parts: int) -> list[list[Shard]]:
    """Divide the shards into parts of about the same number of rows, which can be sent one after the other.

    Pieces are divided at the borders of their rows, so that the codes stay the same. The exact pieces are in the first
    part.
    """
    parts = []
    for index in range(num_parts):
        part = []
        for shard in shards:
            low, high = (shard.num_rows * each // num_parts for each in (index, index + 1))
            part.append(Shard(tuple(rows_of(shard, low, high)), shard.exact if index == 0 else ()))
        parts.append(part)
    return parts


def rows_of(shard: Shard, low: int, high: int) -> Iterator[Piece]:
    """The coded pieces of rows [low, high) of a shard."""
    first = 0
    for piece in shard.coded:
        start = piece.start + max(0, low - first) * ROW
        stop = min(piece.stop, piece.start + max(0, high - first) * ROW)
        if start < stop:
            yield Piece(start, stop, piece.parameter)
        first += piece.num_rows


def gather_rows(gradients: Tensor, shards: Sequence[Shard], zeros: Tensor) -> Tensor:
    """The coded elements of a bucket as [rows, ROW], in the order of the shards.

    Args:
        zeros: [ROW] in the dtype of the gradients.
    """
    parts = []
    for piece in (piece for shard in shards for piece in shard.coded):
        parts.append(gradients[piece.start : piece.stop])
        if piece.size % ROW:
            parts.append(zeros[: -piece.size % ROW])
    flat = torch.cat(parts) if parts else gradients[:0]
    return flat.view(len(flat) // ROW, ROW)


def scatter_rows(gradients: Tensor, shard: Shard, rows: Tensor, exact: Tensor) -> None:
    """Write the sums of a shard into the bucket.

    Args:
        rows: [rows of the shard, ROW].
        exact: [exact elements of the shard].
    """
    flat = rows.view(-1)
    sources = [flat[start : start + piece.size] for start, piece in zip(shard.row_starts, shard.coded, strict=True)]
    targets = [gradients[piece.start : piece.stop] for piece in shard.coded]
    if targets:
        torch._foreach_copy_(targets, sources)
    scatter_exact(gradients, shard, exact)


def scatter_exact(gradients: Tensor, shard: Shard, exact: Tensor) -> None:
    """Write the sums of the elements of a shard that are not coded into the bucket."""
    if shard.exact:
        targets = [gradients[piece.start : piece.stop] for piece in shard.exact]
        torch._foreach_copy_(targets, list(exact.split([piece.size for piece in shard.exact])))
