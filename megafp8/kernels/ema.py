"""The moving average of weights in one pass over all tensors: it reads the FP32 weights, and reads and writes the mean.

    mean = mean + share (weight - mean)

The arithmetic is FP32. The kernel is memory-bound: 12 bytes an element with a mean in FP32, 8 in BF16. The tensors are
given as a table of addresses (`kernels/adam.py`). A mean in BF16 is rounded as in `kernels/random_rounding.py`; rounded
to nearest it would not move, because most updates are smaller than half its spacing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels import random_rounding
from megafp8.kernels.adam import BLOCK, NUM_WARPS, TRITON_TYPES, TensorTable, address, loaded, restored_master

POSITION_STEP = tl.constexpr(random_rounding.POSITION_STEP)
UPDATE_STEP = tl.constexpr(random_rounding.UPDATE_STEP)
FIRST_FACTOR = tl.constexpr(random_rounding.FIRST_FACTOR)
SECOND_FACTOR = tl.constexpr(random_rounding.SECOND_FACTOR)
LOW_HALF = tl.constexpr(random_rounding.LOW_HALF)
NAN_HALF = tl.constexpr(random_rounding.NAN_HALF)


@triton.jit
def rounded_at_random(values, weights, positions, update):
    """`round_at_random` of `kernels/random_rounding.py`, with all arithmetic in 32 bits."""
    x = positions.to(tl.uint32) * POSITION_STEP + update.to(tl.uint32) * UPDATE_STEP
    x ^= weights.to(tl.uint32, bitcast=True)
    x ^= x >> 16
    x *= FIRST_FACTOR
    x ^= x >> 15
    x *= SECOND_FACTOR
    x ^= x >> 16
    # Rounding by the carry of an integer sum: a cast would round to nearest.
    half = (values.to(tl.uint32, bitcast=True) + (x & LOW_HALF)) >> 16
    half = tl.where(values == values, half, NAN_HALF)  # the carry could leave the exponent of a NaN
    return half.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def average_block(
    masters, models, means, offsets, mask, position, share, update, REMAINDER: tl.constexpr
):  # fmt: skip
    """Update one block of the mean of one weight. `position`: of its first element in the rank's weight."""
    weight = loaded(masters, offsets, mask)
    if REMAINDER:
        weight = restored_master(loaded(models, offsets, mask), weight)
    mean = loaded(means, offsets, mask).to(tl.float32)
    mean = tl.fma(weight - mean, share, mean)
    if means.dtype.element_ty == tl.bfloat16:
        mean = rounded_at_random(mean, weight, position + offsets, update)
    tl.store(means + offsets, mean, mask=mask)


# Not specialized for values of `update`, which would compile it again for the first and each sixteenth one.
@triton.jit(do_not_specialize=["update"])
def average_kernel(
    table, lengths, row_of_chunk, index_of_chunk, positions, share, update, MASTER: tl.constexpr, MEAN: tl.constexpr,
    REMAINDER: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one chunk of the mean of one weight."""
    chunk = tl.program_id(0)
    row = tl.load(row_of_chunk + chunk)
    start = tl.load(index_of_chunk + chunk).to(tl.int64) * BLOCK
    left = tl.load(lengths + row) - start
    position = tl.load(positions + row) + start
    masters = address(table, row, 0, 3, MASTER, ALIGNED) + start
    models = address(table, row, 1, 3, tl.bfloat16, ALIGNED) + start
    means = address(table, row, 2, 3, MEAN, ALIGNED) + start
    offsets = tl.arange(0, BLOCK)
    if left >= BLOCK:  # complete: no mask
        average_block(masters, models, means, offsets, None, position, share, update, REMAINDER)
    else:
        average_block(masters, models, means, offsets, offsets < left, position, share, update, REMAINDER)


def update_means(table: TensorTable, positions: Tensor, share: float, update: int) -> None:
    """Move means towards their weights.

    Args:
        table: rows of an FP32 weight, or its 16-bit remainder; the BF16 model weight to which the remainder belongs,
            else None; and the mean in FP32 or BF16. Made with `BLOCK`.
        positions: int64 [rows] on the device: where each row begins in the rank's weight.
        share: of the weight in the new mean, in (0, 1]. With 1 and a mean of zeros, the mean becomes the weight.
        update: number of this update, for the random bits.
    """
    master, _, mean = table.dtypes
    average_kernel[(table.num_chunks,)](
        table.addresses, table.lengths, table.row_of_chunk, table.index_of_chunk, positions, share, update,
        MASTER=TRITON_TYPES[master], MEAN=TRITON_TYPES[mean], REMAINDER=master == torch.int16,
        ALIGNED=table.is_aligned, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
