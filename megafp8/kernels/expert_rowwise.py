"""Casts of experts by the rowwise recipe: a power-of-two scale for each row, and for each column of an expert's rows.

They have the names and arguments of those in `expert_casts.py`. Each is two launches of one kernel, which computes its
values twice: the first launch (without outputs) raises the amaxes, the second one writes codes by the row scales, and
transposed by the column scales. fprop and dgrad sum along a row, wgrad along the rows of an expert. A column's scale
therefore belongs to one expert, and all rows of an expert are read before the first code is written.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.expert_scales import CurrentScale, RowColumnCodes
from megafp8.kernels.experts import EXPERT_BLOCK, experts_of_tile, gathered_tile, gradients_quarter, swiglu_tile
from megafp8.kernels.rounding import FP32_MAX, FormatSpec, cast_to_words, code_dtype, quant_scale_of, without_nan
from megafp8.kernels.routed_rows import RoutedRows
from megafp8.kernels.rowwise import amaxes_kernel, cast_kernel, store_quarter
from megafp8.kernels.tiles import store_words

BLOCK_SIZE, GRADIENTS_BLOCK_SIZE = 128, 64


@triton.jit
def raise_row_amax(y, row_amax, tile_row, QUARTER: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Raise the amaxes of every fourth row of a tile."""
    at = row_amax + tile_row * BLOCK_SIZE + 4 * tl.arange(0, BLOCK_SIZE // 4) + QUARTER
    # Rows past the end raise amaxes too, but those of their own rows only, which nobody reads.
    tl.atomic_max(at, without_nan(tl.max(tl.abs(y), axis=1)))


@triton.jit
def raise_amaxes(
    y, row_amax, column_amax, expert_of_block, tile_row, tile_column, width, end, BLOCK_SIZE: tl.constexpr
):
    """Raise the amaxes of rows [R] and of each expert's columns [E, W] to those of a tile, given as its four
    quarters."""
    raise_row_amax(y[0], row_amax, tile_row, 0, BLOCK_SIZE)
    raise_row_amax(y[1], row_amax, tile_row, 1, BLOCK_SIZE)
    raise_row_amax(y[2], row_amax, tile_row, 2, BLOCK_SIZE)
    raise_row_amax(y[3], row_amax, tile_row, 3, BLOCK_SIZE)
    largest = tl.maximum(tl.maximum(tl.abs(y[0]), tl.abs(y[1])), tl.maximum(tl.abs(y[2]), tl.abs(y[3])))
    # The rows of a block have one expert.
    of_blocks = without_nan(
        tl.max(tl.reshape(largest, [BLOCK_SIZE // EXPERT_BLOCK, EXPERT_BLOCK // 4, BLOCK_SIZE]), axis=1)
    )
    # A quarter has BLOCK_SIZE / 4 rows, of which four consecutive ones are in one block of 16 rows.
    block = tile_row * (BLOCK_SIZE // EXPERT_BLOCK) + tl.arange(0, BLOCK_SIZE // EXPERT_BLOCK)
    experts = tl.load(expert_of_block + block).to(tl.int64)
    # int64: experts x width may be large. The amaxes of columns are [E, W]: an expert's columns have their own.
    at = column_amax + experts[:, None] * width + tile_column * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    # Most blocks do not exceed what other programs have found. An older amax only leads to an update without effect.
    is_larger = of_blocks > tl.load(at, volatile=True)
    tl.atomic_max(at, of_blocks, mask=(block * EXPERT_BLOCK < end)[:, None] & is_larger)


@triton.jit
def cast_tile(
    y, row_amax, column_amax, expert_of_block, rows, columns, row_scale_inv, tile_row, tile_column, num_rows, width,
    end, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Raise the amaxes to those of a tile, or, where `rows` is not None, store its codes."""
    if rows is None:
        raise_amaxes(y, row_amax, column_amax, expert_of_block, tile_row, tile_column, width, end, BLOCK_SIZE)
    else:
        # The scales of rows are computed from the amaxes in each program, and stored by the programs of the first
        # column of tiles.
        store_quarter(
            y[0], row_amax, rows, row_scale_inv, tile_row, tile_column, width, FP32_MAX, 0, True, FORMAT, BLOCK_SIZE
        )
        store_quarter(
            y[1], row_amax, rows, row_scale_inv, tile_row, tile_column, width, FP32_MAX, 1, True, FORMAT, BLOCK_SIZE
        )
        store_quarter(
            y[2], row_amax, rows, row_scale_inv, tile_row, tile_column, width, FP32_MAX, 2, True, FORMAT, BLOCK_SIZE
        )
        store_quarter(
            y[3], row_amax, rows, row_scale_inv, tile_row, tile_column, width, FP32_MAX, 3, True, FORMAT, BLOCK_SIZE
        )
        experts = experts_of_tile(expert_of_block, tile_row, BLOCK_SIZE).to(tl.int64)
        # [BLOCK_SIZE / 4, BLOCK_SIZE]: the four rows that `cast_to_words` packs into a word have one expert, and so one
        # scale in each column.
        at = column_amax + experts[:, None] * width + tile_column * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
        scale = quant_scale_of(tl.load(at), FP32_MAX, True, FORMAT)
        # The word holds four consecutive rows of a column, which are adjacent in the transpose.
        words = cast_to_words(y[0] * scale, y[1] * scale, y[2] * scale, y[3] * scale, FORMAT)
        store_words(words, columns, tile_row, tile_column, num_rows, BLOCK_SIZE)


@triton.jit
def store_column_scales(
    column_amax, column_scale_inv, infinities, tile_row, tile_column, width, NUM_EXPERTS: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The dequantization scales [E, W] of the columns of a tile, and the flags of infinite amaxes. The programs of a
    column of tiles divide the experts."""
    # Every program of the grid takes part, also those past the last live row: an expert without rows has scales, too.
    for expert in range(tile_row, NUM_EXPERTS, tl.num_programs(1)):
        at = expert * width + tile_column * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        # int32 is enough for E x W amaxes. The first launch has ended, so that they are final.
        largest = tl.load(column_amax + at)
        tl.store(column_scale_inv + at, tl.div_rn(1.0, quant_scale_of(largest, FP32_MAX, True, FORMAT)))
        if infinities is not None:
            tl.store(infinities + expert, 1, mask=tl.max(largest) == float("inf"))


@triton.jit
def gather_kernel(
    inputs, token_of_row, expert_of_block, ends, row_amax, column_amax, infinities, rows, columns, row_scale_inv,
    column_scale_inv, num_rows, width, NUM_EXPERTS: tl.constexpr, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Amaxes or codes of the tokens inputs [T, W] of all rows. A program has one tile."""
    tile_column, tile_row = tl.program_id(0), tl.program_id(1)
    # Before the test for the end, as the loop over experts needs all programs of a column.
    if rows is not None:
        store_column_scales(
            column_amax, column_scale_inv, infinities, tile_row, tile_column, width, NUM_EXPERTS, FORMAT, BLOCK_SIZE
        )
    end = tl.load(ends + NUM_EXPERTS - 1)
    if tile_row * BLOCK_SIZE >= end:
        return
    y = gathered_tile(inputs, token_of_row, tile_row, tile_column, width, BLOCK_SIZE)
    # The first launch has no outputs and raises the amaxes; the second one computes the same values again and casts
    # them.
    cast_tile(y, row_amax, column_amax, expert_of_block, rows, columns, row_scale_inv, tile_row, tile_column, num_rows,
              width, end, FORMAT, BLOCK_SIZE)  # fmt: skip


@triton.jit
def swiglu_kernel(
    inputs, probs, expert_of_block, ends, row_amax, column_amax, infinities, rows, columns, row_scale_inv,
    column_scale_inv, num_rows, width, NUM_EXPERTS: tl.constexpr, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Amaxes or codes of p silu(a) b. A program has one tile."""
    tile_column, tile_row = tl.program_id(0), tl.program_id(1)
    if rows is not None:
        store_column_scales(
            column_amax, column_scale_inv, infinities, tile_row, tile_column, width, NUM_EXPERTS, FORMAT, BLOCK_SIZE
        )
    end = tl.load(ends + NUM_EXPERTS - 1)
    if tile_row * BLOCK_SIZE >= end:
        return
    y = swiglu_tile(inputs, probs, tile_row, tile_column, width, BLOCK_SIZE)
    # The values stay FP32 in both launches, so that the amaxes are those of what is cast.
    cast_tile(y, row_amax, column_amax, expert_of_block, rows, columns, row_scale_inv, tile_row, tile_column, num_rows,
              width, end, FORMAT, BLOCK_SIZE)  # fmt: skip


@triton.jit
def swiglu_gradients_kernel(
    gradients, inputs, probs, prob_sums, expert_of_block, ends, row_amax, column_amax, infinities, rows, columns,
    row_scale_inv, column_scale_inv, num_rows, width, NUM_EXPERTS: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Amaxes or codes of the gradients of inputs [R, 2 W], and sums as in `gradients_quarter`. A program has one tile a
    half."""
    left, tile_row = tl.program_id(0), tl.program_id(1)
    # da fills the left W columns of the codes and db the right ones: two tiles with W between them.
    right = left + width // BLOCK_SIZE
    if rows is not None:
        store_column_scales(
            column_amax, column_scale_inv, infinities, tile_row, left, 2 * width, NUM_EXPERTS, FORMAT, BLOCK_SIZE
        )
        store_column_scales(
            column_amax, column_scale_inv, infinities, tile_row, right, 2 * width, NUM_EXPERTS, FORMAT, BLOCK_SIZE
        )
    end = tl.load(ends + NUM_EXPERTS - 1)
    if tile_row * BLOCK_SIZE >= end:
        return
    # `prob_sums` is None in the second launch: the first one has stored the sums already.
    da0, db0 = gradients_quarter(gradients, inputs, probs, prob_sums, tile_row, left, num_rows, width, 0, BLOCK_SIZE)
    da1, db1 = gradients_quarter(gradients, inputs, probs, prob_sums, tile_row, left, num_rows, width, 1, BLOCK_SIZE)
    da2, db2 = gradients_quarter(gradients, inputs, probs, prob_sums, tile_row, left, num_rows, width, 2, BLOCK_SIZE)
    da3, db3 = gradients_quarter(gradients, inputs, probs, prob_sums, tile_row, left, num_rows, width, 3, BLOCK_SIZE)
    cast_tile((da0, da1, da2, da3), row_amax, column_amax, expert_of_block, rows, columns, row_scale_inv, tile_row,
              left, num_rows, 2 * width, end, FORMAT, BLOCK_SIZE)  # fmt: skip
    cast_tile((db0, db1, db2, db3), row_amax, column_amax, expert_of_block, rows, columns, row_scale_inv, tile_row,
              right, num_rows, 2 * width, end, FORMAT, BLOCK_SIZE)  # fmt: skip


@triton.jit
def weights_kernel(
    weights, row_amax, column_amax, infinities, rows, columns, row_scale_inv, column_scale_inv, num_rows, width,
    FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Amaxes or codes of weights [E, N, W], each expert's as `rowwise.cast`. A program has one tile."""
    expert = tl.program_id(2).to(tl.int64)
    start = expert * num_rows * width
    row_amax += expert * num_rows
    column_amax += expert * width
    if rows is None:
        # The callee reads program ids 0 and 1 itself; id 2 has moved its pointers to one expert.
        amaxes_kernel(weights + start, row_amax, column_amax, None, width, BLOCK_SIZE)
    else:
        cast_kernel(weights + start, row_amax, column_amax, rows + start, row_scale_inv + expert * num_rows,
                    columns + start, column_scale_inv + expert * width, num_rows, width, FP32_MAX, True, FORMAT,
                    BLOCK_SIZE)  # fmt: skip
        if infinities is not None:
            # The programs of one column of tiles all find the same and store 1 or nothing.
            largest = tl.max(tl.load(column_amax + tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)))
            tl.store(infinities + expert, 1, mask=largest == float("inf"))


class _Cast:
    """Amaxes, and room for codes, of rows of all experts.

    Args:
        rows: of the experts.
        width: W.
        like: a tensor on their device.
    """

    def __init__(self, rows: RoutedRows, width: int, spec: FormatSpec, scale: CurrentScale, like: Tensor):
        (num_rows,), num_experts = rows.token_of_row.shape, len(rows.ends)
        # One allocation and one launch for both amaxes, which have to start at 0.
        amaxes = like.new_zeros(num_rows + num_experts * width, dtype=torch.float32)
        scales = torch.empty_like(amaxes)
        self.amaxes = amaxes[:num_rows], amaxes[num_rows:]
        self.infinities = scale.infinities
        self.constants: dict[str, Any] = {"NUM_EXPERTS": num_experts, "FORMAT": spec}
        self.codes = RowColumnCodes(
            like.new_empty(num_rows, width, dtype=torch.uint8),
            like.new_empty(width, num_rows, dtype=torch.uint8),
            scales[:num_rows],
            scales[num_rows:].view(num_experts, width),
            code_dtype(spec),
        )

    def launch(self, kernel: Any, *arguments: Any, width: int, block_size: int, writes_codes: bool) -> None:
        """Raise the amaxes, or write codes.

        Args:
            width: of the tiles' tensor.
        """
        num_rows = len(self.codes.rows)
        outputs = self.codes[:4] if writes_codes else (None,) * 4
        # The grid covers the worst case, see `routed_rows`. All tiles are complete: R is a multiple of 128.
        kernel[(width // block_size, num_rows // block_size)](
            *arguments, *self.amaxes, self.infinities, *outputs, num_rows, width, **self.constants,
            BLOCK_SIZE=block_size, num_warps=8 if block_size == BLOCK_SIZE else 4,
        )  # fmt: skip


def gather_codes(
    inputs: Tensor, rows: RoutedRows, routing_map: Tensor, spec: FormatSpec, prequantized: None = None,
    scale: CurrentScale = CurrentScale(),
) -> RowColumnCodes:  # fmt: skip
    """Quantize the token of each row: inputs BF16 [T, W] to codes [R, W]. The routing map is not read."""
    width = inputs.shape[1]
    cast = _Cast(rows, width, spec, scale, inputs)
    # The order of launches on the stream is the barrier between amaxes and codes.
    for writes_codes in (False, True):
        cast.launch(
            gather_kernel, inputs, rows.token_of_row, rows.expert_of_block, rows.ends, width=width,
            block_size=BLOCK_SIZE, writes_codes=writes_codes,
        )  # fmt: skip
    return cast.codes


def swiglu_codes(
    inputs: Tensor, probs: Tensor, rows: RoutedRows, spec: FormatSpec, scale: CurrentScale = CurrentScale()
) -> RowColumnCodes:
    """The codes of `expert_casts.swiglu`."""
    width = inputs.shape[1] // 2
    cast = _Cast(rows, width, spec, scale, inputs)
    for writes_codes in (False, True):
        cast.launch(
            swiglu_kernel, inputs, probs, rows.expert_of_block, rows.ends, width=width, block_size=BLOCK_SIZE,
            writes_codes=writes_codes,
        )  # fmt: skip
    return cast.codes


def swiglu_backward_codes(
    gradients: Tensor, inputs: Tensor, probs: Tensor, rows: RoutedRows, spec: FormatSpec,
    scale: CurrentScale = CurrentScale(),
) -> tuple[RowColumnCodes, Tensor]:  # fmt: skip
    """Codes of the gradients of inputs, and the gradients of probs."""
    num_rows, width = gradients.shape
    cast = _Cast(rows, 2 * width, spec, scale, inputs)
    # A row of sums for each tile of columns: they are added in a fixed order.
    sums: Optional[Tensor]
    prob_sums = sums = probs.new_zeros(width // GRADIENTS_BLOCK_SIZE, num_rows)
    for writes_codes in (False, True):
        cast.launch(
            swiglu_gradients_kernel, gradients, inputs, probs, sums, rows.expert_of_block, rows.ends, width=width,
            block_size=GRADIENTS_BLOCK_SIZE, writes_codes=writes_codes,
        )  # fmt: skip
        # Stored by the first launch. The second one would only store the same numbers again.
        sums = None
    return cast.codes, prob_sums.sum(0)


def weight_codes(weights: Tensor, spec: FormatSpec, scale: CurrentScale = CurrentScale()) -> RowColumnCodes:
    """Codes of weights [E, N, W] BF16."""
    num_experts, num_rows, width = weights.shape
    row_amax, column_amax = (weights.new_zeros(num_experts, size, dtype=torch.float32) for size in (num_rows, width))
    codes = RowColumnCodes(
        torch.empty_like(weights, dtype=torch.uint8),
        weights.new_empty(num_experts, width, num_rows, dtype=torch.uint8),
        torch.empty_like(row_amax),
        torch.empty_like(column_amax),
        code_dtype(spec),
    )
    for outputs in ((None,) * 4, codes[:4]):
        # Without fusion of multiply and add the codes are those of `rowwise.cast`, byte for byte.
        weights_kernel[(width // BLOCK_SIZE, num_rows // BLOCK_SIZE, num_experts)](
            weights, row_amax, column_amax, scale.infinities, *outputs, num_rows, width, FORMAT=spec,
            BLOCK_SIZE=BLOCK_SIZE, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return codes
