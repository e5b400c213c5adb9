"""Tables of `kernels/gradient_rows.py` for one bucket: where its rows lie, in the bucket and in the messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Optional

import torch
from torch import Tensor

from megafp8.optimizer.gradient_pieces import ROW, Shard
from megafp8.recipes.formats import Format
from megafp8.utils.integers import round_up


class FusedRows:
    """Encodes and adds the rows of a bucket in one launch each, in place of torch operations.

    Args:
        shards: by rank.
        own: the rank of this process.
        is_blockwise: rows have scales in the messages, else parameters have scales that all ranks know.
        exact_itemsize: bytes of an element that is not coded.
        alignment: of the messages, in bytes.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        own: int,
        fmt: Format,
        is_blockwise: bool,
        exact_itemsize: int,
        alignment: int,
        device: torch.device,
    ):
        from megafp8.kernels import gradient_rows  # needs Triton
        from megafp8.kernels.rounding import grid_of

        self._kernels, self._grid, self._part = gradient_rows, grid_of(fmt), gradient_rows.PART
        self.shards, self.own, self.exact_itemsize = shards, shards[own], exact_itemsize
        self.sizes: list[int] = []
        self._begins: list[int] = []
        table, first_row = list[tuple[int, ...]](), 0
        for shard in shards:
            self._begins.append(sum(self.sizes))
            codes = self._begins[-1] + shard.num_exact * exact_itemsize
            scales = codes + shard.num_rows * ROW
            table += [
                (start, stop, codes + row * ROW, scales + row, first_row + row, parameter)
                for start, stop, row, parameter in self._parts(shard)
            ]
            size = scales - self._begins[-1] + (shard.num_rows if is_blockwise else 0)
            self.sizes.append(round_up(size, alignment))
            first_row += shard.num_rows
        sums = list(self._parts(self.own))
        rows = [(row * ROW, row * ROW + round_up(stop - start, ROW), row, of) for start, stop, row, of in sums]
        places = [place for each in table for place in each[:3]]
        self._alignment = gradient_rows.alignment_of(places, exact_itemsize)
        self._table, self._sums_table, self._rows_table = (
            torch.tensor(each, dtype=torch.int64, device=device).view(len(each), width)
            for each, width in ((table, 6), (sums, 4), (rows, 4))
        )

    def _parts(self, shard: Shard) -> Iterator[tuple[int, int, int, int]]:
        """The rows of a shard in parts of a program: first element, last element + 1, number of the first row, and
        parameter."""
        first, step = 0, self._part * ROW
        for piece in shard.coded:
            for start in range(piece.start, piece.stop, step):
                yield start, min(start + step, piece.stop), first + (start - piece.start) // ROW, piece.parameter
            first += piece.num_rows

    def amaxes(self, gradients: Tensor, num_parameters: int) -> Tensor:
        """The amax of each parameter in the bucket, FP32 [num_parameters]."""
        return self._kernels.amaxes_of(gradients, self._table, num_parameters, ROW, self._alignment)

    def message(self, gradients: Tensor, parameter_scales: Optional[Tensor], counts: Tensor, sample: int) -> Tensor:
        """The messages to all ranks, uint8 [sum of `sizes`]: exact elements, codes, scales. See `gradient_rows`."""
        message = torch.empty(sum(self.sizes), dtype=torch.uint8, device=gradients.device)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for shard, begin in zip(self.shards, self._begins, strict=True):
            sources += [gradients[piece.start : piece.stop] for piece in shard.exact]
            exact = message[begin : begin + shard.num_exact * self.exact_itemsize].view(gradients.dtype)
            targets += exact.split([piece.size for piece in shard.exact]) if shard.exact else []
        if targets:
            torch._foreach_copy_(targets, sources)
        self._kernels.encode(
            gradients, message, self._table, parameter_scales, counts, sample, self._grid, ROW, self._alignment
        )
        return message

    def add_to_rows(self, received: Tensor, parameter_scales: Optional[Tensor], num_ranks: int, divisor: int) -> Tensor:
        """The sums of the own rows, FP32 [rows, ROW]."""
        rows = torch.empty(self.own.num_rows, ROW, device=received.device)
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
        codes = self.own.num_exact * self.exact_itemsize
        places = (codes, codes + self.own.num_rows * ROW)
        self._kernels.add(
            received, sums, table, parameter_scales, num_ranks, places, divisor, self._grid, ROW, self._alignment
        )
