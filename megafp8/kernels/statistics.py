"""Kernel of the quantization statistics: sums and maxima of a quantized tensor, in one pass over a GPU's memory.

It computes what `accumulate` of `metrics/accumulators.py` computes in torch operations. Values, codes and scales are
read once, and nothing is returned to the host, which need not wait.

A program goes down a strip of RUNS x RUN_VALUES columns, ROWS rows at a time; a run is RUN_VALUES adjacent values of a
row, the unit of the local signal-to-noise ratio. Its partial results stay in registers: counts and maxima of each of
these values, sums of each run. It is one warp, whose threads have a quarter of a run each: none waits for other warps.
At the end it stores the sums in FP64 in its own place, and the caller adds those of all programs in a fixed order, so
that results are reproducible. The amax of each column is an atomic maximum, which is exact in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafp8.kernels.rounding import bits_of, e8m0_value, value_of_code

ROWS, RUNS = 4, 2  # with more, the partial results do not fit into the registers of a warp
PROGRAMS, NUM_WARPS = 1536, 1  # approximate: more do not fit into the registers of an H200 at a time
DB_OF_OCTAVE = tl.constexpr(3.010299956639812)  # 10 log10(2)


@triton.jit
def statistics_kernel(
    values_ptr, codes_ptr, scales_ptr, factor_ptr, channel_bits_ptr, sums_ptr, maxima_ptr, num_rows, num_columns,
    saturates_above, staleness_unit,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, RULE: tl.constexpr, IS_KNOWN: tl.constexpr,
    CAN_SATURATE: tl.constexpr, IS_DELAYED: tl.constexpr, FORMAT: tl.constexpr, SCALE_FORMAT: tl.constexpr,
    NUM_EXPONENTS: tl.constexpr, BINS: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, RUNS: tl.constexpr,
    RUN_VALUES: tl.constexpr,
):  # fmt: skip
    """Sums, maxima and the amaxes of columns.

    A program stores QUANTIZATION_SUMS and then its counts of codes by exponent at `sums_ptr`, and QUANTIZATION_MAXIMA
    at `maxima_ptr`. BLOCK_ROWS is 0 for a tensor with one scale, which is at `factor_ptr`. Without IS_KNOWN the values
    are not compared with their codes. NUM_EXPONENTS is 0 if codes are not counted, which takes a fifth of the
    instructions; BINS is a power of two above it, whose last bin has masked elements and codes that are not finite.
    """
    run_column = (tl.program_id(0) * RUNS + tl.arange(0, RUNS))[None, :, None] * RUN_VALUES
    column = run_column + tl.arange(0, RUN_VALUES)[None, None, :]
    if factor_ptr is not None:
        factor = tl.load(factor_ptr)
    else:
        factor = 1.0
    signals, noises = tl.zeros([ROWS, RUNS], tl.float64), tl.zeros([ROWS, RUNS], tl.float64)
    decibels, runs = tl.zeros([ROWS, RUNS], tl.float32), tl.zeros([ROWS, RUNS], tl.int32)
    num_bad, nonzero = tl.zeros([ROWS, RUNS, RUN_VALUES], tl.int32), tl.zeros([ROWS, RUNS, RUN_VALUES], tl.int32)
    underflow, saturated = tl.zeros([ROWS, RUNS, RUN_VALUES], tl.int32), tl.zeros([ROWS, RUNS, RUN_VALUES], tl.int32)
    if NUM_EXPONENTS > 0:
        exponents = tl.zeros([BINS], tl.int32)
    amax = tl.zeros([ROWS, RUNS, RUN_VALUES], tl.float32)
    scale_min = tl.full([ROWS, RUNS, RUN_VALUES], float("inf"), tl.float32)
    scale_max = tl.zeros([ROWS, RUNS, RUN_VALUES], tl.float32)
    # Programs of a strip stride over the rows.
    for first_row in range(tl.program_id(1) * ROWS, num_rows, tl.num_programs(1) * ROWS):
        # int64: offsets may exceed 2^31.
        row = (first_row + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
        inside = (row < num_rows) & (column < num_columns)
        x = tl.load(values_ptr + row * num_columns + column, mask=inside, other=0.0).to(tl.float32)
        is_finite = tl.abs(x) < float("inf")  # false for NaN
        x = tl.where(is_finite, x, 0.0)  # values that are not finite are counted, and contribute nothing else
        is_nonzero = x != 0
        if FORMAT.code_bits == 8:
            code = tl.load(codes_ptr + row * num_columns + column, mask=inside, other=0).to(tl.int32)
        else:  # two codes in a byte, the even element in its low half
            pair = tl.load(codes_ptr + row * (num_columns // 2) + column // 2, mask=inside, other=0).to(tl.int32)
            code = (pair >> (column % 2 * 4)) & 0xF
        magnitude = code & ((1 << (FORMAT.code_bits - 1)) - 1)
        scale = 1.0
        is_zero = magnitude == 0
        if BLOCK_ROWS > 0:
            across = tl.cdiv(num_columns, BLOCK_COLUMNS)
            # A run then lies in one block, and one load of its scale serves all of its values.
            if BLOCK_COLUMNS % RUN_VALUES == 0:  # one scale a run
                scale_column = run_column
            else:
                scale_column = column
            scale_at = row // BLOCK_ROWS * across + scale_column // BLOCK_COLUMNS
            scale = tl.load(scales_ptr + scale_at, mask=(row < num_rows) & (scale_column < num_columns), other=0)
            if RULE == "two_level":
                scale = value_of_code(scale.to(tl.int32), SCALE_FORMAT)
            elif RULE == "e8m0":
                scale = e8m0_value(scale.to(tl.int32))
            is_zero = is_zero | (scale == 0)
            # Blocks that only have zeros, or whose scale is zero, say nothing about the range of scales.
            is_used = (is_zero == 0) & is_nonzero
            scale_min = tl.minimum(scale_min, tl.where(is_used, scale * factor, float("inf")))
            scale_max = tl.maximum(scale_max, tl.where(is_used, scale * factor, 0.0))

        num_bad += (is_finite == 0).to(tl.int32)
        amax = tl.maximum(amax, tl.abs(x))
        if NUM_EXPONENTS > 0:
            field = tl.where(magnitude == 0, 0, 1 + (magnitude >> FORMAT.mantissa_bits))
            field = tl.where(inside & (magnitude < FORMAT.special), field, BINS - 1)
            exponents += tl.histogram(tl.reshape(field, [ROWS * RUNS * RUN_VALUES]), BINS)
        if IS_KNOWN:
            nonzero += is_nonzero.to(tl.int32)
            underflow += (is_nonzero & is_zero).to(tl.int32)
            if CAN_SATURATE:
                dequant = tl.broadcast_to(scale * factor, [ROWS, RUNS, RUN_VALUES])
                saturated += ((tl.abs(x) > dequant * saturates_above) & (dequant > 0)).to(tl.int32)
            # FP32 differences, whose squares are summed in FP64: sums of millions of FP32 squares would lose digits.
            error = value_of_code(code, FORMAT) * scale * factor - x
            error = tl.where(is_finite, error, 0.0).to(tl.float64)
            wide = x.to(tl.float64)
            signal, noise = tl.sum(wide * wide, 2), tl.sum(error * error, 2)
            has_signal = signal > 0
            # The quotient of a run without signal or noise is computed from 1s and not used.
            ratio = tl.where(has_signal, signal, 1.0) / tl.where(noise > 0, noise, 1.0)
            db = tl.minimum(tl.maximum(tl.log2(ratio.to(tl.float32)) * DB_OF_OCTAVE, 0.0), LIMIT)
            signals += signal
            noises += noise
            decibels += tl.where(has_signal, tl.where(noise > 0, db, LIMIT), 0.0)
            runs += has_signal.to(tl.int32)

    channels = tl.max(amax, 0)
    # The bits of magnitudes are ordered as the numbers are, so that an integer maximum is exact.
    if channel_bits_ptr is not None:
        tl.atomic_max(channel_bits_ptr + tl.reshape(column, [RUNS, RUN_VALUES]), bits_of(channels),
                      mask=tl.reshape(column, [RUNS, RUN_VALUES]) < num_columns)  # fmt: skip
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    own = sums_ptr + program * (10 + NUM_EXPONENTS)
    # Stored once, by the first program: the number of elements is known without counting.
    num_values = (program == 0).to(tl.float64) * num_rows * num_columns  # of all programs
    tl.store(own, num_values)
    tl.store(own + 1, tl.sum(num_bad))
    tl.store(own + 2, num_values * IS_KNOWN)
    tl.store(own + 3, tl.sum(nonzero))
    tl.store(own + 4, tl.sum(underflow))
    tl.store(own + 5, tl.sum(saturated))
    tl.store(own + 6, tl.sum(signals))
    tl.store(own + 7, tl.sum(noises))
    tl.store(own + 8, tl.sum(decibels))
    tl.store(own + 9, tl.sum(runs))
    if NUM_EXPONENTS > 0:
        bins = tl.arange(0, BINS)
        tl.store(own + 10 + bins, exponents, mask=bins < NUM_EXPONENTS)
    largest = tl.max(channels)
    if BLOCK_ROWS > 0:
        smallest_scale, largest_scale = tl.min(scale_min), tl.max(scale_max)
    else:  # one scale, which is used if there is a value that is not zero
        largest_scale = tl.where(largest > 0, factor, 0.0)
        smallest_scale = largest_scale
    # A maximum over programs follows: negative infinity is neutral, and smallest scales are stored as reciprocals.
    has_scale = largest_scale > 0
    own = maxima_ptr + program * 4
    tl.store(own, largest)
    tl.store(own + 1, tl.where(has_scale, 1.0 / smallest_scale.to(tl.float64), float("-inf")))
    tl.store(own + 2, tl.where(has_scale, largest_scale, float("-inf")))
    tl.store(own + 3, float("-inf"))
    if IS_DELAYED:
        expressed = factor.to(tl.float64) * staleness_unit
        tl.store(own + 3, tl.where(has_scale, largest.to(tl.float64) / expressed, float("-inf")))
