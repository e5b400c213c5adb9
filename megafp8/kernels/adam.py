"""Fused multi-tensor AdamW: one kernel scales and clips the gradient, updates both moments and the master weight, and
writes the weight in the model's dtype. Each number is read and written once.

    g = (grad * grad_factor) * clip
    m = beta1 m + (1 - beta1) g;    v = beta2 v + (1 - beta2) g^2
    p = p - lr ((m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p)

The arithmetic is FP32, in the order of Transformer Engine's kernel, from which it differs by roundings; that one leaves
scaling, clipping and the model's copy to passes of their own. The kernel is memory-bound: 30 bytes an element with FP32
state, 20 with BF16 moments and 16-bit remainders.

The tensors of a group are given as a table of addresses (`TensorTable`). Each tensor is cut into chunks of equal
length, and a program has one chunk. A complete chunk is processed without masks; only a tensor's last chunk may need
one.

Moments in FP16 and FP8 (E4M3) are stored divided by a scale of their tensor, which must be known before the first
number of the updated moment is stored. `largest_kernel` computes the amaxes of the updated moments in a pass of its
own, and `optimizer/moment_scales.py` turns them into scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels.rounding import cast_to_code, format_spec
from megafp8.recipes.formats import E4M3

# Elements of a program, tuned with benchmarks/gpu_adam.py. The sum stores one number for each program: fewer programs,
# each with SUM_BLOCKS blocks, are better.
BLOCK = 1024
NUM_WARPS = 4
SUM_BLOCK = 2048
SUM_BLOCKS = 8
SUM_CHUNK = SUM_BLOCK * SUM_BLOCKS
SUM_WARPS = 8
ALIGNMENT_BYTES = 16  # of the widest loads
TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,
}


@dataclass(frozen=True, kw_only=True)
class AdamStep:
    """The hyperparameters of one update.

    Attributes:
        step: number of this update, from 1.
        clip: factor of gradient clipping; 1 does not clip.
    """

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    clip: float


class TensorTable:
    """The argument tables of a multi-tensor kernel: addresses, lengths, and the row and position of each chunk.

    A row has the tensors of one parameter. The table keeps references to the tensors, whose addresses it holds.

    Args:
        rows: one or more contiguous tensors each, of the same length within a row and of the same dtypes in all rows;
            None has the address 0.
        chunk: elements of a program: `BLOCK` for an update, `SUM_CHUNK` for a sum.
    """

    def __init__(self, rows: Sequence[Sequence[Optional[Tensor]]], chunk: int):
        self.rows = rows
        first = rows[0][0]
        assert first is not None
        self.device, self.dtypes = first.device, [None if tensor is None else tensor.dtype for tensor in rows[0]]
        lengths: list[int] = []
        for row in rows:
            sizes = {tensor.numel() for tensor in row if tensor is not None}
            assert len(sizes) == 1 and all(t is None or t.is_contiguous() for t in row), sizes
            lengths += sizes
        addresses = [[0 if tensor is None else tensor.data_ptr() for tensor in row] for row in rows]
        # A tensor at another address forbids the wide loads for all: the alignment is one constant of the kernel.
        self.is_aligned = not any(address % ALIGNMENT_BYTES for row in addresses for address in row)
        # The last chunk of a tensor may be shorter. Chunks never span two tensors.
        counts = [-(-length // chunk) for length in lengths]
        self.num_chunks = sum(counts)
        # Built once and kept on the device: a step copies nothing from the host.
        self.addresses = torch.tensor(addresses, dtype=torch.int64).to(self.device)
        self.lengths = torch.tensor(lengths, dtype=torch.int64).to(self.device)
        of_row = torch.arange(len(rows), dtype=torch.int32)
        self.row_of_chunk = torch.repeat_interleave(of_row, torch.tensor(counts)).to(self.device)
        self.index_of_chunk = torch.cat([torch.arange(count, dtype=torch.int32) for count in counts]).to(self.device)


@triton.jit
def address(table, row, column: tl.constexpr, columns: tl.constexpr, dtype: tl.constexpr, aligned: tl.constexpr):
    """Pointer to a tensor of the table, with its alignment declared, which permits the widest loads."""
    pointer = tl.load(table + row * columns + column).to(tl.pointer_type(dtype))
    if aligned:
        # Chunks begin at multiples of 1,024 elements or more, so that this also holds for their first element.
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def restored_master(model, remainder):
    """FP32 weight from its BF16 rounding `model` and the low half of its bits."""
    # The low half is signed: where it is negative, the high half was rounded up.
    low = remainder.to(tl.int32)
    high = model.to(tl.int16, bitcast=True).to(tl.int32)
    # An addition, not an OR: a negative low half takes back the one that rounding added to the high half.
    return ((high << 16) + low).to(tl.float32, bitcast=True)


@triton.jit
def is_scaled(dtype: tl.constexpr) -> tl.constexpr:
    """Whether a moment of this type has a scale."""
    return dtype == tl.float16 or dtype == tl.uint8


@triton.jit
def loaded(pointers, offsets, mask):
    """Load a block; zeros where it is masked. A mask of None is complete."""
    if mask is None:
        values = tl.load(pointers + offsets)
    else:
        values = tl.load(pointers + offsets, mask=mask, other=0)
    return values


@triton.jit
def loaded_moment(pointers, offsets, mask, scales):
    """Load a block of a moment in FP32. `scales` are its dequantization and its quantization scale, if it has them."""
    stored = loaded(pointers, offsets, mask)
    # The moment's tensor is passed as bytes; `bitcast` gives them their FP8 type.
    if stored.dtype == tl.uint8:
        moment = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        moment = stored.to(tl.float32)
    if is_scaled(stored.dtype):
        moment *= tl.load(scales)
    return moment


@triton.jit
def store_moment(pointers, offsets, mask, moment, scales, FORMAT: tl.constexpr):
    """Round a block of a moment to its dtype and store it; `scales` as for `loaded_moment`."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    if is_scaled(dtype):
        moment *= tl.load(scales + 1)
    if dtype == tl.uint8:
        tl.store(pointers + offsets, cast_to_code(moment, FORMAT), mask=mask)
    else:
        tl.store(pointers + offsets, moment.to(dtype), mask=mask)


@triton.jit
def first_moment(m, g, beta1):
    # Explicitly fused, so that `adam_kernel` and `largest_kernel`, which both call it, round alike.
    return tl.fma(m, beta1, (1.0 - beta1) * g)


@triton.jit
def second_moment(v, g, beta2):
    return tl.fma(v, beta2, ((1.0 - beta2) * g) * g)


@triton.jit
def update_block(
    grads, masters, exp_avgs, exp_avg_sqs, models, scales, offsets, mask, grad_factor, clip, learning_rate, beta1,
    beta2, eps, weight_decay, correction1, correction2, HAS_MODEL: tl.constexpr, REMAINDER: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Update one block of one parameter. `scales` are two of each moment: dequantization and quantization scale."""
    grad = loaded(grads, offsets, mask).to(tl.float32)
    p = loaded(masters, offsets, mask)
    m = loaded_moment(exp_avgs, offsets, mask, scales)
    v = loaded_moment(exp_avg_sqs, offsets, mask, scales + 2)
    if REMAINDER:
        p = restored_master(loaded(models, offsets, mask), p)

    # `grad_factor` is the 1 / tokens by which megatron-core multiplies the gradients. The norm that `clip` follows from
    # is that of these products.
    g = (grad * grad_factor) * clip
    m = first_moment(m, g, beta1)
    v = second_moment(v, g, beta2)
    # `tl.sqrt` and `/` are approximations on a GPU; these round as IEEE requires.
    root = tl.sqrt_rn(tl.div_rn(v, correction2)) + eps
    # Decoupled weight decay: it is added to the update, not to the gradient.
    update = tl.fma(p, weight_decay, tl.div_rn(tl.div_rn(m, correction1), root))
    p = tl.fma(update, -learning_rate, p)

    # Without a remainder the master weight is stored in FP32, and the model weight is its rounding to nearest even.
    stored = p
    rounded = p.to(tl.bfloat16)
    if REMAINDER:
        bits = p.to(tl.int32, bitcast=True)
        stored = bits.to(tl.int16)
        # Rounding up in magnitude from a low half of 2^15 on, ties included, is what `restored_master` undoes.
        rounded = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(masters + offsets, stored, mask=mask)
    store_moment(exp_avgs, offsets, mask, m, scales, FORMAT)
    store_moment(exp_avg_sqs, offsets, mask, v, scales + 2, FORMAT)
    if HAS_MODEL:
        tl.store(models + offsets, rounded, mask=mask)


@triton.jit
def adam_kernel(
    table, lengths, row_of_chunk, index_of_chunk, all_scales, grad_factors, clip, learning_rate, beta1, beta2, eps,
    weight_decay, correction1, correction2, GRAD: tl.constexpr, MASTER: tl.constexpr, EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr, HAS_MODEL: tl.constexpr, REMAINDER: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Update one block of one parameter. A program has one chunk, which is one block."""
    chunk = tl.program_id(0)
    row = tl.load(row_of_chunk + chunk)
    # int64: a tensor may have more than 2^31 elements. Within a chunk offsets fit into int32.
    start = tl.load(index_of_chunk + chunk).to(tl.int64) * BLOCK
    left = tl.load(lengths + row) - start
    grad_factor = tl.load(grad_factors)
    grads = address(table, row, 0, 5, GRAD, ALIGNED) + start
    masters = address(table, row, 1, 5, MASTER, ALIGNED) + start
    exp_avgs = address(table, row, 2, 5, EXP_AVG, ALIGNED) + start
    exp_avg_sqs = address(table, row, 3, 5, EXP_AVG_SQ, ALIGNED) + start
    models = address(table, row, 4, 5, tl.bfloat16, ALIGNED) + start
    # Four numbers a row: dequantization and quantization scale of each moment. Not read for unscaled moments.
    scales = all_scales + 4 * row
    offsets = tl.arange(0, BLOCK)
    # `left` is a scalar, so that all threads take the same branch. Complete chunks compile without masks.
    if left >= BLOCK:
        update_block(
            grads, masters, exp_avgs, exp_avg_sqs, models, scales, offsets, None, grad_factor, clip, learning_rate,
            beta1, beta2, eps, weight_decay, correction1, correction2, HAS_MODEL, REMAINDER, FORMAT,
        )  # fmt: skip
    else:
        update_block(
            grads, masters, exp_avgs, exp_avg_sqs, models, scales, offsets, offsets < left, grad_factor, clip,
            learning_rate, beta1, beta2, eps, weight_decay, correction1, correction2, HAS_MODEL, REMAINDER, FORMAT,
        )  # fmt: skip


@triton.jit
def squared_sum_kernel(
    table, lengths, row_of_chunk, index_of_chunk, factors, sums, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sum of (element * factor)^2 of one chunk of one tensor: BLOCKS blocks in a program, at `sums` + chunk."""
    chunk = tl.program_id(0)
    row = tl.load(row_of_chunk + chunk)
    first = tl.load(index_of_chunk + chunk).to(tl.int64) * (BLOCK * BLOCKS)
    left = tl.load(lengths + row) - first
    factor = tl.load(factors)
    values = address(table, row, 0, 1, DTYPE, ALIGNED) + first
    # Each element adds 8 squares (SUM_BLOCKS) in FP32, and a reduction adds the elements. The sum over chunks is FP64.
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(BLOCKS):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        if (block + 1) * BLOCK <= left:
            value = tl.load(values + offsets).to(tl.float32) * factor
            total += value * value
        elif block * BLOCK < left:
            value = tl.load(values + offsets, mask=offsets < left, other=0.0).to(tl.float32) * factor
            total += value * value
    # Each program has its own place: without atomic additions the sum has the same bits in every run.
    tl.store(sums + chunk, tl.sum(total))


def update_rows(table: TensorTable, grad_factor: Tensor, numbers: AdamStep, scales: Optional[Tensor] = None) -> None:
    """One AdamW update of all rows of a table, in place.

    A row is gradient, master weight, first moment, second moment, and model weight or None
    (`ParameterRow.tensors`). A master weight in INT16 is the remainder of the BF16 model weight.

    Args:
        grad_factor: FP32 [1] on the device, multiplies the gradients before they are clipped.
        scales: result of `MomentScales.update`, for moments in FP16 or FP8.
    """
    grad, master, exp_avg, exp_avg_sq, model = table.dtypes
    assert model in (None, torch.bfloat16) and (master != torch.int16 or model is not None)
    assert scales is not None or not {exp_avg, exp_avg_sq} & {torch.uint8, torch.float16}
    # Triton passes these floats as FP32. The corrections must be powers of the same betas.
    beta1, beta2 = (float(torch.tensor(beta, dtype=torch.float32)) for beta in (numbers.beta1, numbers.beta2))
    adam_kernel[(table.num_chunks,)](
        table.addresses, table.lengths, table.row_of_chunk, table.index_of_chunk,
        grad_factor if scales is None else scales,  # not read if no moment has a scale
        grad_factor, numbers.clip, numbers.learning_rate, numbers.beta1, numbers.beta2, numbers.eps,
        numbers.weight_decay, 1.0 - beta1**numbers.step, 1.0 - beta2**numbers.step,
        GRAD=TRITON_TYPES[grad], MASTER=TRITON_TYPES[master], EXP_AVG=TRITON_TYPES[exp_avg],
        EXP_AVG_SQ=TRITON_TYPES[exp_avg_sq], HAS_MODEL=model is not None, REMAINDER=master == torch.int16,
        ALIGNED=table.is_aligned, BLOCK=BLOCK, FORMAT=format_spec(E4M3), num_warps=NUM_WARPS,
    )  # fmt: skip


def squared_sum(table: TensorTable, factor: Tensor) -> Tensor:
    """Sum over all tensors of a table of (element * factor)^2, an FP64 scalar on the device.

    It is not finite if an element is not, or if the squares of one chunk overflow FP32.

    Args:
        factor: FP32 [1] on the device.
    """
    sums = torch.empty(table.num_chunks, dtype=torch.float32, device=table.device)
    squared_sum_kernel[(table.num_chunks,)](
        table.addresses, table.lengths, table.row_of_chunk, table.index_of_chunk, factor, sums,
        DTYPE=TRITON_TYPES[table.dtypes[0]], ALIGNED=table.is_aligned, BLOCK=SUM_BLOCK, BLOCKS=SUM_BLOCKS,
        num_warps=SUM_WARPS,
    )  # fmt: skip
    # FP64: thousands of chunks would lose digits in FP32. It stays on the device.
    return sums.sum(dtype=torch.float64)


@triton.jit
def largest_of_block(
    top_m, top_v, grads, exp_avgs, exp_avg_sqs, scales, offsets, mask, grad_factor, clip, beta1, beta2
):  # fmt: skip
    """Elementwise maxima of `top_m` and `top_v` and the magnitudes of a block's updated moments."""
    g = (loaded(grads, offsets, mask).to(tl.float32) * grad_factor) * clip
    if is_scaled(exp_avgs.dtype.element_ty):
        m = first_moment(loaded_moment(exp_avgs, offsets, mask, scales), g, beta1)
        top_m = tl.maximum(top_m, tl.abs(m))
    if is_scaled(exp_avg_sqs.dtype.element_ty):
        v = second_moment(loaded_moment(exp_avg_sqs, offsets, mask, scales + 2), g, beta2)
        # No absolute value: a second moment is never negative.
        top_v = tl.maximum(top_v, v)
    return top_m, top_v


@triton.jit
def largest_kernel(
    table, lengths, row_of_chunk, index_of_chunk, all_scales, grad_factors, clip, beta1, beta2, largest,
    GRAD: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Raise `largest` [rows, 2] to the amaxes of the updated moments of one chunk of one parameter.

    The moments are computed exactly as `update_block` computes them, so that the scales fit.
    """
    chunk = tl.program_id(0)
    row = tl.load(row_of_chunk + chunk)
    start = tl.load(index_of_chunk + chunk).to(tl.int64) * (BLOCK * BLOCKS)
    left = tl.load(lengths + row) - start
    grad_factor = tl.load(grad_factors)
    grads = address(table, row, 0, 3, GRAD, ALIGNED) + start
    exp_avgs = address(table, row, 1, 3, EXP_AVG, ALIGNED) + start
    exp_avg_sqs = address(table, row, 2, 3, EXP_AVG_SQ, ALIGNED) + start
    scales = all_scales + 4 * row
    top_m = tl.zeros((BLOCK,), tl.float32)
    top_v = tl.zeros((BLOCK,), tl.float32)
    for block in range(BLOCKS):
        # Blocks of one chunk are accumulated elementwise; one reduction and one atomic operation follow.
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        if (block + 1) * BLOCK <= left:
            top_m, top_v = largest_of_block(
                top_m, top_v, grads, exp_avgs, exp_avg_sqs, scales, offsets, None, grad_factor, clip, beta1, beta2
            )  # fmt: skip
        elif block * BLOCK < left:
            top_m, top_v = largest_of_block(
                top_m, top_v, grads, exp_avgs, exp_avg_sqs, scales, offsets, offsets < left, grad_factor, clip, beta1,
                beta2,
            )  # fmt: skip
    # Moments without a scale are not computed and need no amax. Magnitudes are ordered as their bits are, so that the
    # maximum is exact in any order.
    if is_scaled(EXP_AVG):
        tl.atomic_max(largest + 2 * row, tl.max(top_m))
    if is_scaled(EXP_AVG_SQ):
        tl.atomic_max(largest + 2 * row + 1, tl.max(top_v))
