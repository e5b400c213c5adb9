"""Tables of `kernels/gradient_rows.py` for one bucket: where its rows lie, in the bucket and in the messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Optional

import torch
from torch import Tensor

from megafp8.optimizer.gradient_slices import BLOCK, Shard
from megafp8.recipes.formats import Format
from megafp8.utils.integers import round_up


class FusedRows:
    """Encodes and adds the rows of a bucket in one launch each, in place of torch operations.

    Args:
        shards: by rank.
        own: the rank of this process.
        is_blockwise: rows have scales in the messages, else parameters have scales that all ranks know.
        unquantized_itemsize: bytes of an element that is not quantized.
        alignment: of the messages, in bytes.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        own: int,
        fmt: Format,
        is_blockwise: bool,
        unquantized_itemsize: int,
        alignment: int,
        device: torch.device,
    ):
        from megafp8.kernels import gradient_rows  # needs Triton
        from megafp8.kernels.rounding import format_spec

        self._kernels, self._spec, self._rows_per_program = gradient_rows, format_spec(fmt), gradient_rows.ROWS
        self.shards, self.own, self.unquantized_itemsize = shards, shards[own], unquantized_itemsize
        self.sizes: list[int] = []
        self._begins: list[int] = []
        table, first_row = list[tuple[int, ...]](), 0
        for shard in shards:
            self._begins.append(sum(self.sizes))
            # Unquantized elements come first, at an aligned byte, because they are read as FP32 or BF16.
            codes = self._begins[-1] + shard.num_unquantized * unquantized_itemsize
            scales = codes + shard.num_rows * BLOCK
            # For each program: where it reads, where its codes and scales go, the number of its first row, its
            # parameter.
            table += [
                (start, stop, codes + row * BLOCK, scales + row, first_row + row, parameter)
                for start, stop, row, parameter in self._parts(shard)
            ]
            size = scales - self._begins[-1] + (shard.num_rows if is_blockwise else 0)
            # All messages start at aligned bytes.
            self.sizes.append(round_up(size, alignment))
            first_row += shard.num_rows
        # The rows that this rank adds. They are written either to their places in the bucket or, for an all-reduce, to
        # rows without gaps, whose last one is padded to BLOCK.
        sums = list(self._parts(self.own))
        rows = [(row * BLOCK, row * BLOCK + round_up(stop - start, BLOCK), row, of) for start, stop, row, of in sums]
        offsets = [offset for each in table for offset in each[:3]]
        # One number for all programs: it is a constant of the kernel. An odd size of one parameter can make it 1.
        self._alignment = gradient_rows.alignment_of(offsets, unquantized_itemsize)
        self._table, self._sums_table, self._rows_table = (
            torch.tensor(each, dtype=torch.int64, device=device).view(len(each), width)
            for each, width in ((table, 6), (sums, 4), (rows, 4))
        )

    def _parts(self, shard: Shard) -> Iterator[tuple[int, int, int, int]]:
        """The rows of a shard in parts of a program: first element, last element + 1, number of the first row, and
        parameter."""
        first, step = 0, self._rows_per_program * BLOCK
        for slice_ in shard.quantized:
            # A program stays within a slice, so that it has one parameter.
            for start in range(slice_.start, slice_.stop, step):
                yield start, min(start + step, slice_.stop), first + (start - slice_.start) // BLOCK, slice_.parameter
            first += slice_.num_rows

    def amaxes(self, gradients: Tensor, num_parameters: int) -> Tensor:
        """The amax of each parameter in the bucket, FP32 [num_parameters]."""
        return self._kernels.amaxes_of(gradients, self._table, num_parameters, BLOCK, self._alignment)

    def message(self, gradients: Tensor, parameter_scales: Optional[Tensor], counts: Tensor, sample: int) -> Tensor:
        """The messages to all ranks, uint8 [sum of `sizes`]: unquantized elements, codes, scales. See
        `gradient_rows`."""
        message = torch.empty(sum(self.sizes), dtype=torch.uint8, device=gradients.device)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for shard, begin in zip(self.shards, self._begins, strict=True):
            sources += [gradients[slice_.start : slice_.stop] for slice_ in shard.unquantized]
            unquantized = message[begin : begin + shard.num_unquantized * self.unquantized_itemsize].view(
                gradients.dtype
            )
            targets += unquantized.split([slice_.size for slice_ in shard.unquantized]) if shard.unquantized else []
        if targets:
            torch._foreach_copy_(targets, sources)
        self._kernels.encode(
            gradients, message, self._table, parameter_scales, counts, sample, self._spec, BLOCK, self._alignment
        )
        return message

    def add_to_rows(self, received: Tensor, parameter_scales: Optional[Tensor], num_ranks: int, divisor: int) -> Tensor:
        """The sums of the own rows, FP32 [rows, BLOCK]."""
        rows = torch.empty(self.own.num_rows, BLOCK, device=received.device)
        self._add(received, rows.view(-1), self._rows_table, parameter_scales, num_ranks, divisor)
        return rows

    def add_to_gradients(
        self, received: Tensor, gradients: Tensor, parameter_scales: Optional[Tensor], num_ranks: int, divisor: int
    ) -> None:
        """Write the sums of the own rows into the bucket."""
        self._add(received, gradients, self._sums_table, parameter_scales, num_ranks, divisor)

    def _add(
        self,
        received: Tensor,
        sums: Tensor,
        table: Tensor,
        parameter_scales: Optional[Tensor],
        num_ranks: int,
        divisor: int,
    ) -> None:
        # Offsets in each received message, which has the layout of the own shard.
        codes = self.own.num_unquantized * self.unquantized_itemsize
        offsets = (codes, codes + self.own.num_rows * BLOCK)
        self._kernels.add(
            received, sums, table, parameter_scales, num_ranks, offsets, divisor, self._spec, BLOCK, self._alignment
        )
