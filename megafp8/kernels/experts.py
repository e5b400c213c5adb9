"""Kernels on the rows of mixtures of experts: gather, weighted SwiGLU with its gradients, and sums over a token's rows.

Rows are described by `kernels.routed_rows`. One kernel family writes BF16, the other one writes FP8 codes by rows
and transposed. A scale belongs to an expert's rows. Rows of an expert are a multiple of 16, so that the four rows which
`tiles.py` packs into a word have one scale. What lies behind the last expert's rows is never read for an amax; its
codes are of no use, and grouped GEMMs do not read them.

Under current scaling a first launch has found the amax of each expert. Under delayed scaling the scale of each expert
is known before: there is one launch, which also raises the recorded amaxes [E]; those of gathered tokens come from the
tokens, which are fewer than their rows.

Bytes for each number of a BF16 tensor with current scaling: gather 2 read, 2 written; SwiGLU 8 read (both halves, once
for the amax and once for the codes), 2 written; its gradients 12 read, 4 written. With delayed scaling SwiGLU reads 4
and its gradients 6.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafp8.kernels.delayed import largest_of
from megafp8.kernels.rounding import FP32_MAX, quant_scale_of, widen, without_nan
from megafp8.kernels.swiglu import gate_gradient, sigmoid
from megafp8.kernels.tiles import load_tile, quarter_pointers, store_codes, tile_offset

EXPERT_BLOCK = tl.constexpr(16)


@triton.jit
def experts_of_tile(expert_of_block, tile_row, BLOCK_SIZE: tl.constexpr):
    """The expert of each four rows of a tile, [BLOCK_SIZE / 4]."""
    # A tile has complete blocks of 16 rows, each of one expert. Four rows of a quarter span one block, so that the
    # index changes with every fourth row of the quarter.
    return tl.load(
        expert_of_block + tile_row * (BLOCK_SIZE // EXPERT_BLOCK) + tl.arange(0, BLOCK_SIZE // 4) // (EXPERT_BLOCK // 4)
    )


@triton.jit
def quant_scales(amaxes, scales, experts, FORMAT: tl.constexpr):
    """Quantization scales of some experts: known ones [E], or, where `scales` is None, those of their amaxes [E]."""
    if scales is not None:
        found = tl.load(scales + experts)
    else:
        # A tiny amax makes the quotient infinite; the scale is then the largest FP32 number.
        found = quant_scale_of(tl.load(amaxes + experts), FP32_MAX, False, FORMAT)
    return found


@triton.jit
def flag_infinities(amaxes, infinities, experts, is_expert):
    """Set the flags [E] of experts with an infinite amax to 1; flags None are left out."""
    if infinities is not None:
        # Masked lanes load 0, which is not infinite: the mask of the load also guards the store.
        largest = tl.load(amaxes + experts, mask=is_expert, other=0.0)
        tl.store(infinities + experts, 1, mask=largest == float("inf"))


@triton.jit
def store_scales(
    amaxes, scales, infinities, scale_inv, is_first, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """The dequantization scales of all experts [E] and the flags of infinite amaxes, by one program. EXPERTS is a power
    of two, NUM_EXPERTS or more."""
    if is_first:
        # `tl.arange` takes powers of two only. Lanes past the last expert read its scale and store nothing.
        at = tl.arange(0, EXPERTS)
        scale = quant_scales(amaxes, scales, tl.minimum(at, NUM_EXPERTS - 1), FORMAT)
        tl.store(scale_inv + at, tl.div_rn(1.0, scale), mask=at < NUM_EXPERTS)
        flag_infinities(amaxes, infinities, at, at < NUM_EXPERTS)


@triton.jit
def raise_amaxes(y, amaxes, experts, tile_row, ends, NUM_EXPERTS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Raise the amax of each expert to that of its rows in a tile, given as its four quarters; NaN is ignored. Where
    `amaxes` is None nothing is recorded."""
    if amaxes is not None:
        largest = tl.maximum(tl.maximum(tl.abs(y[0]), tl.abs(y[1])), tl.maximum(tl.abs(y[2]), tl.abs(y[3])))
        of_rows = without_nan(tl.max(largest, axis=1))
        # A live tile can end in rows that no expert has. GEMMs leave them uninitialized, and `expert_of_block` gives
        # them to the last expert, whose amax they must not raise.
        is_live = tile_row * BLOCK_SIZE + 4 * tl.arange(0, BLOCK_SIZE // 4) < tl.load(ends + NUM_EXPERTS - 1)
        # Most rows do not exceed what other programs have found. An older amax only leads to an update without effect.
        is_larger = of_rows > tl.load(amaxes + experts, volatile=True)
        tl.atomic_max(amaxes + experts, of_rows, mask=is_live & is_larger)


@triton.jit
def raise_amax(largest, amaxes, expert):
    """Raise the amax of one expert; where `amaxes` is None nothing is recorded."""
    if amaxes is not None:
        tl.atomic_max(amaxes + expert, largest)


@triton.jit
def gathered_quarter(
    inputs, token_of_row, tile_row, tile_column, width, QUARTER: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Every fourth row of a tile of gathered tokens, in FP32; zeros for empty rows."""
    # Rows in [0, R) all exist in the table, also past the last expert, where the token is -1.
    tokens = tl.load(token_of_row + tile_row * BLOCK_SIZE + 4 * tl.arange(0, BLOCK_SIZE // 4) + QUARTER)
    # int64: a token times the width may exceed 2^31.
    at = inputs + tokens.to(tl.int64)[:, None] * width + tile_column * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    # The address of token -1 lies before the tensor; the mask keeps it from being read. Zeros change no amax and no
    # sum.
    return widen(tl.load(at, mask=(tokens >= 0)[:, None], other=0.0))


@triton.jit
def gathered_tile(inputs, token_of_row, tile_row, tile_column, width, BLOCK_SIZE: tl.constexpr):
    """The four quarters of a tile of gathered tokens."""
    return (
        gathered_quarter(inputs, token_of_row, tile_row, tile_column, width, 0, BLOCK_SIZE),
        gathered_quarter(inputs, token_of_row, tile_row, tile_column, width, 1, BLOCK_SIZE),
        gathered_quarter(inputs, token_of_row, tile_row, tile_column, width, 2, BLOCK_SIZE),
        gathered_quarter(inputs, token_of_row, tile_row, tile_column, width, 3, BLOCK_SIZE),
    )


@triton.jit
def gather_codes_kernel(
    inputs, token_of_row, expert_of_block, amaxes, scales, infinities, ends, rows, columns, scale_inv, num_rows, width,
    IS_SCALED: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Codes of the tokens inputs [T, W] of all rows. A program has one tile. Tokens that arrived IS_SCALED."""
    tile_column, tile_row = tl.program_id(0), tl.program_id(1)
    # IS_SCALED: the tokens are the numbers of codes, so that a cast with the scale 1 returns exactly these codes. Their
    # dequantization scales are in `scale_inv` already.
    if not IS_SCALED:
        # Before the test for the end: with no token at all, every program returns there, and GEMMs still read the
        # scales.
        is_first = (tile_row == 0) & (tile_column == 0)
        store_scales(amaxes, scales, infinities, scale_inv, is_first, NUM_EXPERTS, EXPERTS, FORMAT)
    # The grid has the rows of the worst case, because the host does not know how many are live. Programs past the end
    # return at once.
    if tile_row * BLOCK_SIZE >= tl.load(ends + NUM_EXPERTS - 1):
        return
    y = gathered_tile(inputs, token_of_row, tile_row, tile_column, width, BLOCK_SIZE)
    scale = tl.full([BLOCK_SIZE // 4, 1], 1.0, tl.float32)
    if not IS_SCALED:
        experts = experts_of_tile(expert_of_block, tile_row, BLOCK_SIZE)
        scale = quant_scales(amaxes, scales, experts, FORMAT)[:, None]
    store_codes(y, scale, tile_row, tile_column, num_rows, width, rows, columns, FORMAT, BLOCK_SIZE)


@triton.jit
def gather_kernel(inputs, token_of_row, ends, results, width, NUM_EXPERTS: tl.constexpr, WIDTH: tl.constexpr):
    """Copy a token to each of its rows; empty rows become zero. A program has one row."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(ends + NUM_EXPERTS - 1):
        return
    token, at = tl.load(token_of_row + row).to(tl.int64), tl.arange(0, WIDTH)
    # One vector mask for both cases: columns past the width, and all columns of an empty row (token -1).
    x = tl.load(inputs + token * width + at, mask=at < tl.where(token >= 0, width, 0), other=0.0)
    tl.store(results + row * width + at, x, mask=at < width)


@triton.jit
def sum_rows_kernel(inputs, rows_of_token, results, width, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
    """Add the rows of a token in FP32, in the order of its experts. A program has one token."""
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    # A fixed order: the sum has the same bits in every run. Atomic additions would not.
    for index in tl.static_range(TOP_K):
        row = tl.load(rows_of_token + token * TOP_K + index).to(tl.int64)
        # Row -1, where a token has fewer experts, masks all columns and adds zeros.
        total += tl.load(inputs + row * width + at, mask=at < tl.where(row >= 0, width, 0), other=0.0).to(tl.float32)
    tl.store(results + token * width + at, total.to(results.dtype.element_ty), mask=at < width)


@triton.jit
def token_amax_kernel(inputs, amaxes, width, WIDTH: tl.constexpr):
    """Amax of each token, FP32 [T]. A program has one token."""
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    x = tl.load(inputs + token * width + at, mask=at < width, other=0.0).to(tl.float32)
    # One program has the complete row, so that no atomic maximum is needed.
    tl.store(amaxes + token, without_nan(tl.max(tl.abs(x))))


@triton.jit
def swiglu_block(inputs, probs, row, column, width, COLUMNS: tl.constexpr):
    """Both halves of inputs [R, 2 W] at 16 rows, and the rows' probabilities, in FP32."""
    rows = row + tl.arange(0, EXPERT_BLOCK)
    # No masks: R is a multiple of 16 and W of COLUMNS, and the rows of a block all exist.
    at = inputs + rows.to(tl.int64)[:, None] * (2 * width) + column + tl.arange(0, COLUMNS)[None, :]
    return widen(tl.load(at)), widen(tl.load(at + width)), tl.load(probs + rows)[:, None]


@triton.jit
def swiglu_rows_kernel(
    inputs, probs, ends, expert_of_block, results, amaxes, width, NUM_EXPERTS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """inputs [R, 2 W] to results p silu(a) b [R, W], or, where `results` is None, to their amax of each expert [E].

    A program has 16 rows.
    """
    block = tl.program_id(0)
    # `ends` are multiples of 16, so that a block is live or dead as a whole.
    if block * EXPERT_BLOCK >= tl.load(ends + NUM_EXPERTS - 1):
        return
    # The maximum over columns stays elementwise in registers; one reduction follows after the loop.
    largest = tl.zeros([EXPERT_BLOCK, COLUMNS], tl.float32)
    for column in range(0, width, COLUMNS):
        a, b, p = swiglu_block(inputs, probs, block * EXPERT_BLOCK, column, width, COLUMNS)
        y = a * sigmoid(a) * b * p
        if results is not None:
            rows = (block * EXPERT_BLOCK + tl.arange(0, EXPERT_BLOCK)).to(tl.int64)[:, None]
            at = results + rows * width + column + tl.arange(0, COLUMNS)[None, :]
            tl.store(at, y.to(results.dtype.element_ty))
        largest = tl.maximum(largest, tl.abs(y))
    if amaxes is not None:
        # A block has one expert: one atomic operation for 16 rows. Magnitudes are ordered as their bits are, so that
        # the maximum is exact in any order.
        tl.atomic_max(amaxes + tl.load(expert_of_block + block), without_nan(tl.max(largest)))


@triton.jit
def swiglu_gradients_rows_kernel(
    gradients, inputs, probs, ends, expert_of_block, results, prob_gradients, amaxes, width,
    NUM_EXPERTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of `swiglu_rows_kernel`: of probs [R], and of inputs [R, 2 W] or their amax of each expert [E]."""
    block = tl.program_id(0)
    if block * EXPERT_BLOCK >= tl.load(ends + NUM_EXPERTS - 1):
        return
    rows = block * EXPERT_BLOCK + tl.arange(0, EXPERT_BLOCK)
    # A program has complete rows. Their sums over columns need no atomic additions and have a fixed order.
    largest, total = tl.zeros([EXPERT_BLOCK, COLUMNS], tl.float32), tl.zeros([EXPERT_BLOCK], tl.float32)
    for column in range(0, width, COLUMNS):
        a, b, p = swiglu_block(inputs, probs, block * EXPERT_BLOCK, column, width, COLUMNS)
        at = rows.to(tl.int64)[:, None] * width + column + tl.arange(0, COLUMNS)[None, :]
        dy = widen(tl.load(gradients + at))
        s = sigmoid(a)
        total += tl.sum(a * s * b * dy, axis=1)
        # SwiGLU's result is p silu(a) b: the gradients of a and b have the factor p, that of p is silu(a) b dy.
        da, db = gate_gradient(a, s, b, dy * p), a * s * dy * p
        if results is not None:
            to = results + rows.to(tl.int64)[:, None] * (2 * width) + column + tl.arange(0, COLUMNS)[None, :]
            tl.store(to, da.to(results.dtype.element_ty))
            tl.store(to + width, db.to(results.dtype.element_ty))
        largest = tl.maximum(largest, tl.maximum(tl.abs(da), tl.abs(db)))
    tl.store(prob_gradients + rows, total)
    if amaxes is not None:
        tl.atomic_max(amaxes + tl.load(expert_of_block + block), without_nan(tl.max(largest)))


@triton.jit
def quarter_of(inputs, probs, tile_row, tile_column, width, QUARTER: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Every fourth row of a tile: both halves of inputs [R, 2 W] and the probabilities, in FP32."""
    # The two halves of a row are W apart: `at` is in the left one, in a matrix of 2 W columns.
    at = quarter_pointers(
        inputs + tile_offset(tile_row, tile_column, 2 * width, BLOCK_SIZE), 2 * width, QUARTER, BLOCK_SIZE
    )
    p = tl.load(probs + tile_row * BLOCK_SIZE + 4 * tl.arange(0, BLOCK_SIZE // 4) + QUARTER)[:, None]
    return widen(tl.load(at)), widen(tl.load(at + width)), p


@triton.jit
def swiglu_quarter(inputs, probs, tile_row, tile_column, width, QUARTER: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """p silu(a) b of every fourth row of a tile."""
    a, b, p = quarter_of(inputs, probs, tile_row, tile_column, width, QUARTER, BLOCK_SIZE)
    return a * sigmoid(a) * b * p


@triton.jit
def swiglu_tile(inputs, probs, tile_row, tile_column, width, BLOCK_SIZE: tl.constexpr):
    """The four quarters of a tile of p silu(a) b."""
    return (
        swiglu_quarter(inputs, probs, tile_row, tile_column, width, 0, BLOCK_SIZE),
        swiglu_quarter(inputs, probs, tile_row, tile_column, width, 1, BLOCK_SIZE),
        swiglu_quarter(inputs, probs, tile_row, tile_column, width, 2, BLOCK_SIZE),
        swiglu_quarter(inputs, probs, tile_row, tile_column, width, 3, BLOCK_SIZE),
    )


@triton.jit
def swiglu_codes_kernel(
    inputs, probs, expert_of_block, amaxes, scales, infinities, ends, rows, columns, scale_inv, num_rows, width,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Codes of p silu(a) b, given the amax or the scale of each expert. A program has one tile."""
    tile_column, tile_row = tl.program_id(0), tl.program_id(1)
    is_first = (tile_row == 0) & (tile_column == 0)
    store_scales(amaxes, scales, infinities, scale_inv, is_first, NUM_EXPERTS, EXPERTS, FORMAT)
    if tile_row * BLOCK_SIZE >= tl.load(ends + NUM_EXPERTS - 1):
        return
    y = swiglu_tile(inputs, probs, tile_row, tile_column, width, BLOCK_SIZE)
    experts = experts_of_tile(expert_of_block, tile_row, BLOCK_SIZE)
    if scales is not None:
        # The amax is that of the FP32 results which are cast, as in the first launch of current scaling.
        raise_amaxes(y, amaxes, experts, tile_row, ends, NUM_EXPERTS, BLOCK_SIZE)
    scale = quant_scales(amaxes, scales, experts, FORMAT)[:, None]
    store_codes(y, scale, tile_row, tile_column, num_rows, width, rows, columns, FORMAT, BLOCK_SIZE)


@triton.jit
def gradients_quarter(
    gradients, inputs, probs, prob_sums, tile_row, tile_column, num_rows, width, QUARTER: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Gradients of both halves, of every fourth row of a tile. The tile's part of the gradients of probs is stored to
    prob_sums [W / BLOCK_SIZE, R]; None leaves it out."""
    a, b, p = quarter_of(inputs, probs, tile_row, tile_column, width, QUARTER, BLOCK_SIZE)
    at = quarter_pointers(gradients + tile_offset(tile_row, tile_column, width, BLOCK_SIZE), width, QUARTER, BLOCK_SIZE)
    dy, s = widen(tl.load(at)), sigmoid(a)
    if prob_sums is not None:
        # [W / BLOCK_SIZE, R]: each tile has its own place, and the caller adds the tiles in a fixed order.
        to = (
            prob_sums
            + tile_column.to(tl.int64) * num_rows
            + tile_row * BLOCK_SIZE
            + 4 * tl.arange(0, BLOCK_SIZE // 4)
            + QUARTER
        )
        tl.store(to, tl.sum(a * s * b * dy, axis=1))
    return gate_gradient(a, s, b, dy * p), a * s * (dy * p)


@triton.jit
def swiglu_gradients_codes_kernel(
    gradients, inputs, probs, prob_sums, expert_of_block, amaxes, scales, infinities, ends, rows, columns, scale_inv,
    num_rows, width, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Codes of the gradients of inputs [R, 2 W], given the amax or the scale of each expert, and sums of the gradients
    of probs as in `gradients_quarter`. A program has one tile a half."""
    tile_column, tile_row = tl.program_id(0), tl.program_id(1)
    is_first = (tile_row == 0) & (tile_column == 0)
    store_scales(amaxes, scales, infinities, scale_inv, is_first, NUM_EXPERTS, EXPERTS, FORMAT)
    if tile_row * BLOCK_SIZE >= tl.load(ends + NUM_EXPERTS - 1):
        return
    da0, db0 = gradients_quarter(
        gradients, inputs, probs, prob_sums, tile_row, tile_column, num_rows, width, 0, BLOCK_SIZE
    )
    da1, db1 = gradients_quarter(
        gradients, inputs, probs, prob_sums, tile_row, tile_column, num_rows, width, 1, BLOCK_SIZE
    )
    da2, db2 = gradients_quarter(
        gradients, inputs, probs, prob_sums, tile_row, tile_column, num_rows, width, 2, BLOCK_SIZE
    )
    da3, db3 = gradients_quarter(
        gradients, inputs, probs, prob_sums, tile_row, tile_column, num_rows, width, 3, BLOCK_SIZE
    )
    experts = experts_of_tile(expert_of_block, tile_row, BLOCK_SIZE)
    # Both halves are one operand of fc1's dgrad and wgrad, so that they have one amax and one scale.
    if scales is not None:
        raise_amaxes((da0, da1, da2, da3), amaxes, experts, tile_row, ends, NUM_EXPERTS, BLOCK_SIZE)
        raise_amaxes((db0, db1, db2, db3), amaxes, experts, tile_row, ends, NUM_EXPERTS, BLOCK_SIZE)
    scale = quant_scales(amaxes, scales, experts, FORMAT)[:, None]
    store_codes(
        (da0, da1, da2, da3), scale, tile_row, tile_column, num_rows, 2 * width, rows, columns, FORMAT, BLOCK_SIZE
    )
    # The right half begins W columns later, in the same matrix of 2 W columns. W is a multiple of BLOCK_SIZE.
    store_codes(
        (db0, db1, db2, db3), scale, tile_row, tile_column + width // BLOCK_SIZE, num_rows, 2 * width, rows, columns,
        FORMAT, BLOCK_SIZE,
    )  # fmt: skip


@triton.jit
def weights_amax_kernel(weights, amaxes, size, COLUMNS: tl.constexpr):
    """Raise the amax of each expert [E] to that of its weights [E, size]."""
    expert = tl.program_id(1)
    largest = tl.zeros([COLUMNS], tl.float32)
    # About 1,024 programs share the weights; each strides over them and ends in one atomic operation.
    for start in range(tl.program_id(0) * COLUMNS, size, tl.num_programs(0) * COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        # int64: all experts of a layer may have more than 2^31 weights. One expert's offset fits into int32.
        x = widen(tl.load(weights + expert.to(tl.int64) * size + at, mask=at < size, other=0.0))
        largest = tl.maximum(largest, tl.abs(x))
    tl.atomic_max(amaxes + expert, without_nan(tl.max(largest)))


@triton.jit
def weights_codes_kernel(
    weights, amaxes, scales, infinities, rows, columns, scale_inv, num_rows, width, FORMAT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Codes of weights [E, R, W] and of their transpose [E, W, R], given the amax or the scale of each expert. A
    program has one tile."""
    tile_column, tile_row, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = expert.to(tl.int64) * num_rows * width
    y = load_tile(weights + start + tile_offset(tile_row, tile_column, width, BLOCK_SIZE), width, BLOCK_SIZE)
    if scales is not None:
        # Delayed scaling reads `scales` only, so that raising the amaxes here cannot change the scales of other
        # programs.
        raise_amax(largest_of(y), amaxes, expert)
    scale = quant_scales(amaxes, scales, expert, FORMAT)
    if (tile_row == 0) & (tile_column == 0):
        tl.store(scale_inv + expert, tl.div_rn(1.0, scale))
        # A scalar mask that is always true: `flag_infinities` stores under a mask.
        flag_infinities(amaxes, infinities, expert, expert >= 0)
    # An expert's codes begin at the same offset in both layouts: [R, W] and [W, R] have the same size.
    store_codes(y, scale, tile_row, tile_column, num_rows, width, rows + start, columns + start, FORMAT, BLOCK_SIZE)
