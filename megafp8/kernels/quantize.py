"""Triton kernels of the emulated quantization, each one pass over memory.

    amax_kernel                amax of a tensor
    transformed_amax_kernel    amaxes of a tensor and of its Hadamard transform, from one read
    quantize_tensor_kernel     codes or values with one scale
    quantize_blocks_kernel     codes or values of row blocks and of column blocks, from one read
    decode_tensor_kernel       codes to values
    decode_blocks_kernel       codes and block scales to values
    finish_product_kernel      factor x product + bias, rounded once

"Values" are what a GEMM multiplies: decoded codes times the scales of their blocks. Where they are written, codes need
not be. A result that is not wanted is passed as None: Triton compiles a kernel without its stores. A program counts the
non-finite and saturated values of its tile, which it reads again if there may be any. Ragged edges are masked: masked
elements load as 0, which changes no amax and no count, and are not stored. `quantization/triton_quantize.py` launches
the kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafp8.kernels.rounding import (
    FP32_MAX,
    INFINITY,
    PER_FOUR,
    PER_SIX,
    TOP,
    TOP_OF_FOUR_OR_SIX,
    bits_of,
    e8m0_scales,
    e8m0_value,
    quant_scale_of,
    round_to_code,
    round_to_value,
    two_level_scales,
    value_of_code,
    without_nan,
)


@triton.jit
def store_amax(bits_ptr, x):
    """Raise an amax in memory, stored as the bits of an FP32 number, to that of x."""
    # The bits of magnitudes are ordered as the numbers are: an integer atomic maximum is exact in any order.
    bits = bits_of(without_nan(tl.max(tl.abs(x))))
    # The load may be outdated, but the amax only grows: most programs find it high enough already and skip the atomic
    # operation.
    if bits > tl.load(bits_ptr):
        tl.atomic_max(bits_ptr, bits)


@triton.jit
def zeros_unless_non_finite(x):
    """Zeros, and NaN for values that are not finite. Their sum tells whether there are any, for the price of a product
    and an addition, which a GPU starts twice as often as a comparison."""
    return x.to(tl.float32) * 0.0


@triton.jit
def largest_of_chunks(x_ptr, count, LEAVES_OUT_NAN: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The largest magnitudes [BLOCK_SIZE] of every `num_programs`-th chunk of BLOCK_SIZE elements."""
    largest = tl.zeros([BLOCK_SIZE], tl.float32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK_SIZE, count, tl.num_programs(0) * BLOCK_SIZE):
        at = start + tl.arange(0, BLOCK_SIZE)
        magnitudes = tl.abs(tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32))
        if LEAVES_OUT_NAN:
            magnitudes = without_nan(magnitudes)
        largest = tl.maximum(largest, magnitudes, propagate_nan=tl.PropagateNan.ALL)
    return largest


@triton.jit
def amax_kernel(x_ptr, amax_bits_ptr, has_non_finite_ptr, count, BLOCK_SIZE: tl.constexpr):
    """Amax of `count` elements, and 1 in `has_non_finite_ptr` if any is not finite."""
    largest = largest_of_chunks(x_ptr, count, False, BLOCK_SIZE)
    if tl.sum(zeros_unless_non_finite(largest)) != 0:
        tl.store(has_non_finite_ptr, 1)
        largest = largest_of_chunks(x_ptr, count, True, BLOCK_SIZE)
    store_amax(amax_bits_ptr, largest)


@triton.jit
def count_values(counts_ptr, more_counts_ptr, source, x, scaled, SATURATES_FROM: tl.constexpr):
    """Add a tile's values to two counts: those of the source that are not finite, and finite ones of x whose product
    with the scale rounds beyond the format. `more_counts_ptr` has the counts of another use of the codes, or is None.

    Most kernels read the tile again for this, where there may be anything to count: values that are kept for it would
    take registers in all programs.
    """
    is_beyond = (tl.abs(scaled) >= SATURATES_FROM) & (tl.abs(x) < INFINITY)
    is_finite = tl.abs(source) < INFINITY  # false for NaN
    # Both counts are one sum, since a tile has fewer than 2^15 values.
    tl.static_assert(source.numel < 1 << 15)
    number = tl.sum(tl.where(is_finite, 0, 1 << 16) + is_beyond.to(tl.int32))
    if number > 0:
        tl.atomic_add(counts_ptr, (number >> 16).to(tl.int64))
        tl.atomic_add(counts_ptr + 1, (number & 0xFFFF).to(tl.int64))
        if more_counts_ptr is not None:
            tl.atomic_add(more_counts_ptr, (number >> 16).to(tl.int64))
            tl.atomic_add(more_counts_ptr + 1, (number & 0xFFFF).to(tl.int64))


@triton.jit
def quantize_tensor_kernel(
    x_ptr, scale_ptr, has_non_finite_ptr, codes_ptr, values_ptr, dequant_ptr, recorded_amax_ptr, counts_ptr,
    more_counts_ptr, count,
    POWER_OF_TWO: tl.constexpr, IS_DELAYED: tl.constexpr, FORMAT: tl.constexpr, SATURATES_FROM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Quantize with one scale; a program has BLOCK_SIZE elements.

    `scale_ptr` is the tensor's amax, or with delayed scaling its quantization scale. `has_non_finite_ptr` is that of
    `amax_kernel`; delayed scaling has none. `recorded_amax_ptr` is raised to the tensor's amax, for delayed scaling;
    None records nothing.
    """
    scale = tl.load(scale_ptr)
    if not IS_DELAYED:
        scale = quant_scale_of(scale, FP32_MAX, POWER_OF_TWO, FORMAT)
    if tl.program_id(0) == 0:
        tl.store(dequant_ptr, tl.div_rn(1.0, scale))
    at = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    if recorded_amax_ptr is not None:
        store_amax(recorded_amax_ptr, x)
    scaled = x * scale
    if IS_DELAYED and counts_ptr is not None:  # tiles saturate often
        count_values(counts_ptr, more_counts_ptr, x, x, scaled, SATURATES_FROM)
    if codes_ptr is not None:
        tl.store(codes_ptr + at, round_to_code(scaled, None, FORMAT).to(tl.uint8), mask=at < count)
    if values_ptr is not None:
        tl.store(values_ptr + at, round_to_value(scaled, None, FORMAT).to(values_ptr.dtype.element_ty), mask=at < count)
    if not IS_DELAYED and counts_ptr is not None:
        # Finite values fit the scale of a finite amax, which may be that of several ranks.
        is_suspect = (tl.load(scale_ptr) == INFINITY) | (tl.load(has_non_finite_ptr) != 0)
        if is_suspect:
            # Volatile, or the compiler keeps the first read in registers.
            x = tl.load(x_ptr + at, mask=at < count, other=0.0, volatile=True).to(tl.float32)
            count_values(counts_ptr, more_counts_ptr, x, x, x * scale, SATURATES_FROM)


@triton.jit
def decode_tensor_kernel(codes_ptr, values_ptr, count, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Codes to values, without their one scale."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    codes = tl.load(codes_ptr + at, mask=at < count, other=0).to(tl.int32)
    tl.store(values_ptr + at, value_of_code(codes, FORMAT).to(values_ptr.dtype.element_ty), mask=at < count)


# --- blocks -----------------------------------------------------------------------------------------------------------
#
# A program has a tile of BLOCK_SIZE rows and TILES x BLOCK_SIZE columns, as a tensor [BLOCK_SIZE, TILES, BLOCK_SIZE] of
# TILES squares. Row blocks (1 x BLOCK_SIZE) are reduced along its last dim, column blocks (BLOCK_SIZE x 1) along its
# first, square blocks along both. Programs are numbered along the rows of tiles.


@triton.jit
def position_of_tile(num_columns, BLOCK_SIZE: tl.constexpr, TILES: tl.constexpr):
    """This program's tile: the index of its row of blocks (int64), and column indices [1, TILES, 1] of its squares."""
    across = tl.cdiv(num_columns, BLOCK_SIZE * TILES)
    squares = (tl.program_id(0) % across) * TILES + tl.arange(0, TILES)[None, :, None]
    return (tl.program_id(0) // across).to(tl.int64), squares


@triton.jit
def offsets_of_tile(squares, num_columns, num_rows_left, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets [BLOCK_SIZE, TILES, WIDTH] from the tile's first row in a matrix with WIDTH columns per square, and their
    mask.

    WIDTH is BLOCK_SIZE, or BLOCK_SIZE / 2 for two codes in a byte. Offsets are relative to a row, so that they fit into
    int32.
    """
    rows, columns = tl.arange(0, BLOCK_SIZE)[:, None, None], squares * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    return rows * num_columns + columns, (rows < num_rows_left) & (columns < num_columns)


@triton.jit
def transformed(x, matrix_ptr, BLOCK_SIZE: tl.constexpr, TILES: tl.constexpr):
    """The Hadamard transform along the rows of a BF16 tile; BLOCK_SIZE is 16."""
    # All columns of the tile share one matrix product on the tensor cores: [16, 16] . [16, TILES x 16].
    at = tl.arange(0, BLOCK_SIZE)
    matrix = tl.load(matrix_ptr + at[:, None] * BLOCK_SIZE + at[None, :])
    product = tl.dot(matrix, tl.reshape(x, [BLOCK_SIZE, TILES * BLOCK_SIZE]), out_dtype=tl.float32)
    return tl.reshape(product.to(tl.bfloat16), [BLOCK_SIZE, TILES, BLOCK_SIZE])


@triton.jit
def transformed_amax_kernel(
    x_ptr, matrix_ptr, amax_bits_ptr, num_rows, num_columns, BLOCK_SIZE: tl.constexpr, TILES: tl.constexpr
):
    """Amaxes of a tensor and of its Hadamard transform, in two consecutive words at `amax_bits_ptr`."""
    block_row, squares = position_of_tile(num_columns, BLOCK_SIZE, TILES)
    at, inside = offsets_of_tile(squares, num_columns, num_rows - block_row * BLOCK_SIZE, BLOCK_SIZE, BLOCK_SIZE)
    x = tl.load(x_ptr + block_row * BLOCK_SIZE * num_columns + at, mask=inside, other=0.0)
    store_amax(amax_bits_ptr, x.to(tl.float32))
    store_amax(amax_bits_ptr + 1, transformed(x, matrix_ptr, BLOCK_SIZE, TILES).to(tl.float32))


@triton.jit
def quantize_blocks_kernel(
    x_ptr, matrix_ptr, num_rows, num_columns, on_overflow,
    row_amax_ptr, row_noise_ptr, row_codes_ptr, row_scales_ptr, row_values_ptr, row_factor_ptr, row_counts_ptr,
    more_row_counts_ptr,
    column_amax_ptr, column_noise_ptr, column_codes_ptr, column_scales_ptr, column_values_ptr, column_factor_ptr,
    column_counts_ptr, more_column_counts_ptr,
    IS_SQUARE: tl.constexpr, RULE: tl.constexpr, FORMAT: tl.constexpr, SCALE_FORMAT: tl.constexpr,
    SATURATES_FROM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Quantize a tile in row blocks 1 x BLOCK_SIZE (BLOCK_SIZE x BLOCK_SIZE if IS_SQUARE) and in column blocks
    BLOCK_SIZE x 1, from one read.

    With a matrix, column blocks are those of the Hadamard transform. With two-level scaling `row_amax_ptr` and
    `column_amax_ptr` are the amaxes of the tensor and its transform, and the tensor scales are stored in the factors;
    for other scales they are None.
    """
    block_row, squares = position_of_tile(num_columns, BLOCK_SIZE, TILES)
    num_rows_left = num_rows - block_row * BLOCK_SIZE
    at, inside = offsets_of_tile(squares, num_columns, num_rows_left, BLOCK_SIZE, BLOCK_SIZE)
    x_ptr += block_row * BLOCK_SIZE * num_columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if row_counts_ptr is not None or column_counts_ptr is not None:
        has_non_finite = tl.sum(zeros_unless_non_finite(x)) != 0
    if row_codes_ptr is not None or row_values_ptr is not None:
        across = tl.cdiv(num_columns, BLOCK_SIZE)  # scales in a row of row blocks
        if IS_SQUARE:
            scale_at, scale_inside = block_row * across + squares, squares < across
        else:
            rows = tl.arange(0, BLOCK_SIZE)[:, None, None]
            scale_at = block_row * BLOCK_SIZE * across + rows * across + squares
            scale_inside = (rows < num_rows_left) & (squares < across)
        row_peak = store_blocks(
            x, scale_at, scale_inside, block_row, squares, num_rows, num_columns, across * BLOCK_SIZE,
            on_overflow, row_amax_ptr, row_noise_ptr, row_codes_ptr, row_scales_ptr, row_values_ptr, row_factor_ptr,
            IS_SQUARE, True, RULE, FORMAT, SCALE_FORMAT, BLOCK_SIZE,
        )  # fmt: skip
    if column_codes_ptr is not None or column_values_ptr is not None:
        if matrix_ptr is not None:
            x = transformed(x, matrix_ptr, BLOCK_SIZE, TILES)
        columns = squares * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, None, :]
        column_peak = store_blocks(
            x, block_row * num_columns + columns, columns < num_columns,
            block_row, squares, num_rows, num_columns, num_columns, on_overflow,
            column_amax_ptr, column_noise_ptr, column_codes_ptr, column_scales_ptr, column_values_ptr,
            column_factor_ptr, True, False, RULE, FORMAT, SCALE_FORMAT, BLOCK_SIZE,
        )  # fmt: skip
    first_square = tl.min(squares)  # of the tile
    if row_counts_ptr is not None:
        count_tile(
            x_ptr, None, has_non_finite | (row_peak >= SATURATES_FROM), first_square, num_rows_left, num_columns,
            on_overflow, row_amax_ptr, row_counts_ptr, more_row_counts_ptr, IS_SQUARE, True, RULE, FORMAT, SCALE_FORMAT,
            SATURATES_FROM, BLOCK_SIZE, TILES,
        )  # fmt: skip
    if column_counts_ptr is not None:
        count_tile(
            x_ptr, matrix_ptr, has_non_finite | (column_peak >= SATURATES_FROM), first_square, num_rows_left,
            num_columns, on_overflow, column_amax_ptr, column_counts_ptr, more_column_counts_ptr, True, False, RULE,
            FORMAT, SCALE_FORMAT, SATURATES_FROM, BLOCK_SIZE, TILES,
        )  # fmt: skip


@triton.jit
def count_tile(
    x_ptr, matrix_ptr, is_suspect, first_square, num_rows_left, num_columns, on_overflow, amax_ptr, counts_ptr,
    more_counts_ptr,
    IS_TALL: tl.constexpr, IS_WIDE: tl.constexpr, RULE: tl.constexpr, FORMAT: tl.constexpr, SCALE_FORMAT: tl.constexpr,
    SATURATES_FROM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """`count_values` of the tile whose first row is at `x_ptr`, if there may be anything to count.

    It is read again, one square after the other, and scaled again: what is kept takes registers in every program.
    """
    if is_suspect:
        for index in range(TILES):
            at, inside = offsets_of_tile(first_square + index, num_columns, num_rows_left, BLOCK_SIZE, BLOCK_SIZE)
            source = tl.load(x_ptr + at, mask=inside, other=0.0, volatile=True)  # not the first read, kept
            x = source
            if matrix_ptr is not None:
                x = transformed(source, matrix_ptr, BLOCK_SIZE, 1)
            _, quant, _, _ = scales_of_tile(x, on_overflow, amax_ptr, IS_TALL, IS_WIDE, RULE, FORMAT, SCALE_FORMAT)
            # A two-level scale that underflowed, FP32_MAX here, makes zeros of its block.
            scaled = tl.where(quant < FP32_MAX, x.to(tl.float32) * quant, 0.0)
            count_values(counts_ptr, more_counts_ptr, source.to(tl.float32), x.to(tl.float32), scaled, SATURATES_FROM)


@triton.jit
def squared_error(x, quant, dequant, unit, IS_TALL: tl.constexpr, IS_WIDE: tl.constexpr, FORMAT: tl.constexpr):
    """`nvfp4_variants.squared_errors` of the blocks of `scales_of_tile`, added in the same order."""
    x = x.to(tl.float32)
    error = x * unit - round_to_value(x * quant, None, FORMAT) * dequant
    error = error * error
    # One return: Triton gives those of all branches one type, also of branches that a constant excludes.
    if not IS_WIDE:
        sums = pair_sums(tl.permute(error, (1, 2, 0)))[None, :, :]
    elif IS_TALL:
        sums = pair_sums(tl.permute(pair_sums(error), (1, 0))[None, :, :])
        sums = tl.permute(sums, (1, 0))[None, :, :]
    else:
        sums = pair_sums(error)[:, :, None]
    return sums


@triton.jit
def pair_sums(x):
    """Sums over the 16 values of the last dim of [a, b, 16]: neighbours first, then their neighbouring sums."""
    tl.static_assert(x.shape[2] == 16)
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 8, 2]))
    even, odd = tl.split(tl.reshape(even + odd, [x.shape[0], x.shape[1], 4, 2]))
    even, odd = tl.split(tl.reshape(even + odd, [x.shape[0], x.shape[1], 2, 2]))
    even, odd = tl.split(even + odd)
    return even + odd


@triton.jit
def scales_of_tile(
    x, on_overflow, amax_ptr, IS_TALL: tl.constexpr, IS_WIDE: tl.constexpr, RULE: tl.constexpr, FORMAT: tl.constexpr,
    SCALE_FORMAT: tl.constexpr,
):  # fmt: skip
    """Amaxes, quantization scales, dequantization scales and their codes of a tile's blocks, which broadcast to it.

    A block has all rows of the tile if IS_TALL, else one, and the columns of a square if IS_WIDE, else one. `amax_ptr`
    is the amax of the tensor, for two-level scaling.
    """
    largest = tl.abs(x.to(tl.float32))
    if IS_WIDE:
        largest = tl.max(largest, axis=2, keep_dims=True)
    if IS_TALL:
        largest = tl.max(largest, axis=0, keep_dims=True)
    largest = without_nan(largest)
    if RULE == "two_level":
        quant, dequant, scale_codes = two_level_scales(largest, tl.load(amax_ptr), TOP, PER_SIX, SCALE_FORMAT)
    elif RULE == "four_over_six":
        of_tensor = tl.load(amax_ptr)
        unit = tl.div_rn(1.0, tl.div_rn(of_tensor, TOP_OF_FOUR_OR_SIX))
        quant, dequant, scale_codes = two_level_scales(largest, of_tensor, TOP_OF_FOUR_OR_SIX, PER_SIX, SCALE_FORMAT)
        quant_of_four, dequant_of_four, codes_of_four = two_level_scales(
            largest, of_tensor, TOP_OF_FOUR_OR_SIX, PER_FOUR, SCALE_FORMAT
        )
        error_of_four = squared_error(x, quant_of_four, dequant_of_four, unit, IS_TALL, IS_WIDE, FORMAT)
        is_four = error_of_four < squared_error(x, quant, dequant, unit, IS_TALL, IS_WIDE, FORMAT)  # false for NaN
        quant, dequant = tl.where(is_four, quant_of_four, quant), tl.where(is_four, dequant_of_four, dequant)
        scale_codes = tl.where(is_four, codes_of_four, scale_codes)
    elif RULE == "e8m0" or RULE == "e8m0_floor":
        quant, dequant, scale_codes = e8m0_scales(largest, RULE == "e8m0_floor", FORMAT)
    else:
        quant = quant_scale_of(largest, on_overflow, RULE == "power_of_two", FORMAT)
        dequant = tl.div_rn(1.0, quant)
        scale_codes = dequant
    return largest, quant, dequant, scale_codes


@triton.jit
def store_blocks(
    x, scale_at, scale_inside, block_row, squares, num_rows, num_columns, noise_width, on_overflow,
    amax_ptr, noise_ptr, codes_ptr, scales_ptr, values_ptr, factor_ptr,
    IS_TALL: tl.constexpr, IS_WIDE: tl.constexpr, RULE: tl.constexpr, FORMAT: tl.constexpr, SCALE_FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Scale, round and store a tile in the blocks of `scales_of_tile`.

    Returns the largest scaled amax of scales with which finite values can saturate: those of two-level scaling, which
    are rounded, and E8M0 rounded down. It is 0 for other scales.
    """
    largest, quant, dequant, scale_codes = scales_of_tile(
        x, on_overflow, amax_ptr, IS_TALL, IS_WIDE, RULE, FORMAT, SCALE_FORMAT
    )
    peak = 0.0
    if amax_ptr is not None or RULE == "e8m0_floor":
        peak = tl.max(tl.where(quant < FP32_MAX, largest * quant, 0.0))  # FP32_MAX: the scale underflowed
    if factor_ptr is not None and tl.program_id(0) == 0:
        top: tl.constexpr = TOP if RULE == "two_level" else TOP_OF_FOUR_OR_SIX
        tl.store(factor_ptr, tl.div_rn(tl.load(amax_ptr), top))
    scaled = x.to(tl.float32) * quant
    first_row = block_row * BLOCK_SIZE
    at, inside = offsets_of_tile(squares, num_columns, num_rows - first_row, BLOCK_SIZE, BLOCK_SIZE)
    noise = None
    if noise_ptr is not None:  # `noise_width` columns: random bytes exist for padded blocks, too
        noise_at, noise_inside = offsets_of_tile(squares, noise_width, num_rows - first_row, BLOCK_SIZE, BLOCK_SIZE)
        noise = tl.load(noise_ptr + first_row * noise_width + noise_at, mask=noise_inside, other=0)
    if codes_ptr is not None:
        tl.store(scales_ptr + scale_at, scale_codes, mask=scale_inside)
        codes = round_to_code(scaled, noise, FORMAT)
        if FORMAT.code_bits == 4:  # two codes in a byte, the even element in its low half
            even, odd = tl.split(tl.reshape(codes, [BLOCK_SIZE, codes.shape[1], BLOCK_SIZE // 2, 2]))
            pair_at, pair_inside = offsets_of_tile(
                squares, num_columns // 2, num_rows - first_row, BLOCK_SIZE, BLOCK_SIZE // 2
            )
            pairs = (even | (odd << 4)).to(tl.uint8)
            tl.store(codes_ptr + first_row * (num_columns // 2) + pair_at, pairs, mask=pair_inside)
        else:
            tl.store(codes_ptr + first_row * num_columns + at, codes.to(tl.uint8), mask=inside)
    if values_ptr is not None:
        values = round_to_value(scaled, noise, FORMAT) * dequant
        tl.store(values_ptr + first_row * num_columns + at, values.to(values_ptr.dtype.element_ty), mask=inside)
    return peak


@triton.jit
def decode_blocks_kernel(
    codes_ptr, scales_ptr, values_ptr, num_rows, num_columns,
    IS_TALL: tl.constexpr, IS_WIDE: tl.constexpr, RULE: tl.constexpr, FORMAT: tl.constexpr, SCALE_FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Codes times the scales of their blocks, which have BLOCK_SIZE rows if IS_TALL, else 1, and BLOCK_SIZE columns if
    IS_WIDE."""
    block_row, squares = position_of_tile(num_columns, BLOCK_SIZE, TILES)
    first_row = block_row * BLOCK_SIZE
    num_rows_left = num_rows - first_row
    at, inside = offsets_of_tile(squares, num_columns, num_rows_left, BLOCK_SIZE, BLOCK_SIZE)
    if FORMAT.code_bits == 8:
        codes = tl.load(codes_ptr + first_row * num_columns + at, mask=inside, other=0).to(tl.int32)
    else:
        width = num_columns // 2
        pair_at, pair_inside = offsets_of_tile(squares, width, num_rows_left, BLOCK_SIZE, BLOCK_SIZE // 2)
        pairs = tl.load(codes_ptr + first_row * width + pair_at, mask=pair_inside, other=0).to(tl.int32)
        codes = tl.reshape(tl.join(pairs & 0xF, pairs >> 4), [BLOCK_SIZE, TILES, BLOCK_SIZE])
    rows, columns = (
        tl.arange(0, BLOCK_SIZE)[:, None, None],
        squares * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, None, :],
    )
    across = num_columns
    if IS_WIDE:
        columns, across = squares, tl.cdiv(num_columns, BLOCK_SIZE)
    if IS_TALL:
        scale = tl.load(scales_ptr + block_row * across + columns, mask=columns < across, other=0)
    else:
        scale_inside = (rows < num_rows_left) & (columns < across)
        scale = tl.load(scales_ptr + first_row * across + rows * across + columns, mask=scale_inside, other=0)
    if RULE == "two_level":
        scale = value_of_code(scale.to(tl.int32), SCALE_FORMAT)
    elif RULE == "e8m0":
        scale = e8m0_value(scale.to(tl.int32))
    values = value_of_code(codes, FORMAT) * scale
    tl.store(values_ptr + first_row * num_columns + at, values.to(values_ptr.dtype.element_ty), mask=inside)


# --- GEMM epilogue ----------------------------------------------------------------------------------------------------


@triton.jit
def finish_product_kernel(product_ptr, factor_ptr, bias_ptr, out_ptr, count, num_columns, BLOCK_SIZE: tl.constexpr):
    """factor x product + bias of a matrix with `num_columns` columns; a program has BLOCK_SIZE elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    value = tl.load(product_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    if factor_ptr is not None:
        value *= tl.load(factor_ptr)
    if bias_ptr is not None:
        value += tl.load(bias_ptr + at % num_columns, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=at < count)
