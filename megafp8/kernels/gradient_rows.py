"""Kernels of the gradient reduction in FP8: rows of gradients to codes in a message, and received codes to sums.

    amaxes   read the gradients of a bucket where they lie; the amax of each parameter, for scales of parameters
    encode   read them, and write codes and E8M0 scales where they are sent from
    add      read the codes of all ranks, add them in FP32 in the order of the ranks, and write the sums

One launch each. Bytes for each FP32 gradient with R ranks: 4 for amaxes, 5 to encode, and 1 + 4 / R to add. A program
has up to ROWS rows of one slice of a parameter (`optimizer/gradient_slices.py`), in a table of where they lie. Codes,
scales and sums are those of the torch operations in `optimizer/fp8_gradients.py`, to the bit.

The places in a table are multiples of ALIGNMENT, which the compiler cannot know: a thread reads 16 bytes of FP32 at a
time and writes four codes where it is 4, and single elements where it is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.rounding import (
    FormatSpec,
    cast_to_code,
    e8m0_scales,
    e8m0_value,
    value_of_code,
    widen,
    without_nan,
)

ROWS = 32


@triton.jit
def amaxes_kernel(gradients, table, amaxes, BLOCK: tl.constexpr, ROWS: tl.constexpr, ALIGNMENT: tl.constexpr):
    # Six columns of the table for each program, see `encode`. They are int64: offsets may exceed 2^31.
    columns = table + tl.program_id(0).to(tl.int64) * 6
    # The compiler cannot see the alignment of a loaded number. Told of it, it vectorizes the loads.
    start = tl.multiple_of(tl.load(columns), ALIGNMENT)
    stop = tl.multiple_of(tl.load(columns + 1), ALIGNMENT)
    parameter = tl.load(columns + 5)
    within = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # The last row of a slice may be incomplete; what follows belongs to another parameter or is padding.
    x = widen(tl.load(gradients + start + within, mask=start + within < stop, other=0.0))
    # Several programs have rows of one parameter. Magnitudes are ordered as their bits are: the maximum is exact in any
    # order.
    tl.atomic_max(amaxes + parameter, tl.max(without_nan(tl.max(tl.abs(x), axis=1))))


@triton.jit
def encode_kernel(
    gradients, message, table, parameter_scales, counts, sample, FORMAT: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    columns = table + tl.program_id(0).to(tl.int64) * 6
    start = tl.multiple_of(tl.load(columns), ALIGNMENT)
    stop = tl.multiple_of(tl.load(columns + 1), ALIGNMENT)
    first_code = tl.multiple_of(tl.load(columns + 2), ALIGNMENT)
    # The number of a row fits into int32, whose remainder is cheaper than that of int64.
    first_row = tl.load(columns + 4).to(tl.int32) % sample
    rows = tl.arange(0, ROWS)
    within = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # A row exists if its first element does. All of its BLOCK codes are stored, with zeros after the last element:
    # receivers read complete rows.
    is_row = start + rows * BLOCK < stop
    x = widen(tl.load(gradients + start + within, mask=start + within < stop, other=0.0))
    if parameter_scales is None:
        # NaN does not set the scale. Its code is NaN, so that the sum is NaN and is found.
        quant_scale, _, scale_codes = e8m0_scales(without_nan(tl.max(tl.abs(x), axis=1)), False, FORMAT)
        tl.store(message + tl.load(columns + 3) + rows, scale_codes, mask=is_row)
        scaled = x * quant_scale[:, None]
    else:
        # Scales of parameters are known on all ranks; none is sent.
        scaled = x * tl.load(parameter_scales + tl.load(columns + 5))
    codes = cast_to_code(scaled, FORMAT)
    tl.store(message + first_code + within, codes, mask=is_row[:, None])
    if (first_row == 0) | (first_row + ROWS > sample):  # a remainder for each row costs more than the cast
        is_counted = is_row & ((first_row + rows) % sample == 0)
        num_values = tl.sum(((x != 0) & is_counted[:, None]).to(tl.int32))
        # Without the sign: -0 is an underflow, too.
        num_nonzero_codes = tl.sum((((codes.to(tl.int32) & 0x7F) != 0) & is_counted[:, None]).to(tl.int32))
        # FP64 holds integers below 2^53 exactly, so that additions in any order give the same count.
        tl.atomic_add(counts, num_values.to(tl.float64))
        tl.atomic_add(counts + 1, (num_values - num_nonzero_codes).to(tl.float64))
        if parameter_scales is not None:
            num_saturated = tl.sum(((tl.abs(scaled) > FORMAT.max) & is_counted[:, None]).to(tl.int32))
            tl.atomic_add(counts + 2, num_saturated.to(tl.float64))


@triton.jit
def add_kernel(
    received, sums, table, parameter_scales, rank_bytes, first_code, first_scale, num_ranks, divisor,
    FORMAT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    columns = table + tl.program_id(0).to(tl.int64) * 4
    start = tl.multiple_of(tl.load(columns), ALIGNMENT)
    stop = tl.multiple_of(tl.load(columns + 1), ALIGNMENT)
    first_row = tl.load(columns + 2)
    rows = tl.arange(0, ROWS)
    within = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # Codes exist for complete rows, sums only for elements of the parameter.
    is_row, inside = start + rows * BLOCK < stop, start + within < stop
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    # The row's place in the first rank's message. `rank_bytes` further is the same row of the next rank.
    message = received + first_row * BLOCK + first_code
    scales = received + first_row + first_scale
    # The order of the ranks: every run adds in the same order, as the torch operations do.
    for _ in range(num_ranks):
        # Rows past the end decode zeros with a finite scale, and are not stored.
        values = value_of_code(tl.load(message + within, mask=is_row[:, None], other=0).to(tl.int32), FORMAT)
        if parameter_scales is None:
            # A product of a code and a power of two, which FP32 holds exactly unless it is subnormal.
            scale = e8m0_value(tl.load(scales + rows, mask=is_row, other=0).to(tl.int32))
            total += values * scale[:, None]
        else:
            total += values * tl.load(parameter_scales + tl.load(columns + 3))
        message += rank_bytes
        scales += rank_bytes
    if divisor is not None:
        # IEEE division, as torch divides by a tensor; `/` may be an approximation.
        total = tl.div_rn(total, tl.zeros_like(total) + divisor)
    tl.store(sums + start + within, total.to(sums.dtype.element_ty), mask=inside)


def alignment_of(offsets: Iterable[int], itemsize: int) -> int:
    """The elements of a 16-byte access, or less where an offset in a table is not a multiple of them."""
    return math.gcd(16 // itemsize, *offsets)


def amaxes_of(gradients: Tensor, table: Tensor, num_parameters: int, block: int, alignment: int) -> Tensor:
    """The largest magnitude of each parameter, FP32 [num_parameters]; NaN is ignored. For the rest see `encode`."""
    amaxes = gradients.new_zeros(num_parameters, dtype=torch.float32)
    if len(table):
        amaxes_kernel[(len(table),)](gradients, table, amaxes, BLOCK=block, ROWS=ROWS, ALIGNMENT=alignment)
    return amaxes


def encode(
    gradients: Tensor,
    message: Tensor,
    table: Tensor,
    parameter_scales: Optional[Tensor],
    counts: Tensor,
    sample: int,
    spec: FormatSpec,
    block: int,
    alignment: int,
) -> None:
    """Write the codes and scales of gradients into a message.

    Args:
        gradients: of a bucket, flat, FP32 or BF16.
        message: uint8.
        table: int64 [programs, 6]: first and last element + 1 in the bucket, places of the first code and of the first
            scale in the message, the number of the first row, and the parameter. Elements beyond the last one are
            quantized as zeros.
        parameter_scales: FP32 [parameters], multiply the gradients; None: each row has an E8M0 scale.
        counts: FP64 [3]; of every `sample`-th row the values that are not 0 are added to the first element, those of
            them that became 0 to the second, and with scales of parameters those that saturated to the third.
        block: elements that share a scale, a power of two.
        alignment: a power of two; the elements and the places of codes in the table are multiples of it.
    """
    if len(table):
        encode_kernel[(len(table),)](
            gradients, message, table, parameter_scales, counts, sample, FORMAT=spec, BLOCK=block, ROWS=ROWS,
            ALIGNMENT=alignment, enable_fp_fusion=False,
        )  # fmt: skip


def add(
    received: Tensor,
    sums: Tensor,
    table: Tensor,
    parameter_scales: Optional[Tensor],
    num_ranks: int,
    offsets: tuple[int, int],
    divisor: int,
    spec: FormatSpec,
    block: int,
    alignment: int,
) -> None:
    """Add the codes of all ranks.

    Args:
        received: uint8, the messages of all ranks, of the same size.
        sums: flat, FP32 or BF16; written where the table says.
        table: int64 [programs, 4]: first and last element + 1 in `sums`, the number of the first row, the parameter.
        parameter_scales: FP32 [parameters], multiply the codes; None: each row has an E8M0 scale.
        offsets: of the first code and of the first scale in each message.
        divisor: the sums are divided by it.
        alignment: a power of two; the elements in the table are multiples of it.
    """
    if len(table):
        add_kernel[(len(table),)](
            # No division by 1: passed as None, the kernel is compiled without it.
            received, sums, table, parameter_scales, len(received) // num_ranks, *offsets, num_ranks,
            None if divisor == 1 else float(divisor), FORMAT=spec, BLOCK=block, ROWS=ROWS, ALIGNMENT=alignment,
            enable_fp_fusion=False,
        )  # fmt: skip
