"""AdamW over many tensors in one kernel: scale and clip the gradient, update the moments and the master weight, and
write the weight in the model's format, each number read and written once.

    g = (grad * grad_factor) * clip
    m = beta1 m + (1 - beta1) g;    v = beta2 v + (1 - beta2) g^2
    p = p - lr ((m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p)

In FP32, in the order of Transformer Engine's kernel, from which it differs by roundings; that one leaves scaling,
clipping and the copy to passes of their own. Elementwise it is bound by memory: 30 bytes an element
with FP32 state, 20 with BF16 moments and 16-bit remainders.

The tensors are given as a table of addresses, cut into chunks of equal length, a program each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a program, measured with benchmarks/gpu_adam.py. The sum makes a number of each program: fewer are better.
BLOCK = 1024
NUM_WARPS = 4
SUM_BLOCK = 2048
SUM_BLOCKS = 8
SUM_CHUNK = SUM_BLOCK * SUM_BLOCKS
SUM_WARPS = 8
ALIGNMENT = 16  # bytes; what the widest loads need
COLUMNS = ("grad", "master", "exp_avg", "exp_avg_sq", "model")
TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int16: tl.int16,
}


@dataclass(frozen=True, kw_only=True)
class AdamStep:
    """The numbers of one update.

    Attributes:
        step: number of this update, from 1.
        clip: factor that brings the gradients to the largest allowed norm; 1 leaves them.
    """

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    clip: float


@dataclass(frozen=True)
class Row:
    """One parameter, or the part of it that this rank updates; all tensors have as many elements.

    Attributes:
        grad: FP32 or BF16.
        master: FP32 weight; or, in 16 bits, what the BF16 `model` lacks of it (rounded to nearest, ties away).
        exp_avg: first moment, FP32 or BF16.
        exp_avg_sq: second moment, FP32 or BF16.
        model: the weight that the model computes with; None where `master` is that, or where another kernel writes it.
    """

    grad: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    model: Optional[Tensor]

    @property
    def dtypes(self) -> tuple[Optional[torch.dtype], ...]:
        """One for each of `COLUMNS`."""
        return tuple(None if tensor is None else tensor.dtype for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[Optional[Tensor], ...]:
        """In the order of `COLUMNS`."""
        return self.grad, self.master, self.exp_avg, self.exp_avg_sq, self.model


class TensorTable:
    """Tensors of equal dtypes as a kernel finds them: addresses, lengths, and which chunk belongs to which row.

    It keeps the tensors, since the addresses would outlive them.

    Args:
        rows: one or more tensors each, contiguous, of one length in a row; None has the address 0.
        chunk: elements that a program works on: `BLOCK` for an update, `SUM_CHUNK` for a sum.
    """

    def __init__(self, rows: Sequence[Sequence[Optional[Tensor]]], chunk: int):
        self.rows = rows
        first = rows[0][0]
        assert first is not None
        self.device = first.device
        for row in rows:
            sizes = {tensor.numel() for tensor in row if tensor is not None}
            assert len(sizes) == 1 and all(t is None or t.is_contiguous() for t in row), sizes
        lengths = [row[0].numel() for row in rows]
        addresses = [[0 if tensor is None else tensor.data_ptr() for tensor in row] for row in rows]
        self.is_aligned = not any(address % ALIGNMENT for row in addresses for address in row)
        counts = [-(-length // chunk) for length in lengths]
        self.num_chunks = sum(counts)
        self.addresses = torch.tensor(addresses, dtype=torch.int64).to(self.device)
        self.lengths = torch.tensor(lengths, dtype=torch.int64).to(self.device)
        of_row = torch.arange(len(rows), dtype=torch.int32)
        self.row_of_chunk = torch.repeat_interleave(of_row, torch.tensor(counts)).to(self.device)
        self.place_of_chunk = torch.cat([torch.arange(count, dtype=torch.int32) for count in counts]).to(self.device)


@triton.jit
def address(table, row, column: tl.constexpr, columns: tl.constexpr, dtype: tl.constexpr, aligned: tl.constexpr):
    """Pointer to a tensor of the table."""
    pointer = tl.load(table + row * columns + column).to(tl.pointer_type(dtype))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def restored_master(model, remainder):
    """FP32 weight from its BF16 rounding and the low half of its bits."""
    # The low half counts from -2^15: where it is negative, the high half was rounded up.
    low = remainder.to(tl.int32)
    high = model.to(tl.int16, bitcast=True).to(tl.int32)
    return ((high << 16) + low).to(tl.float32, bitcast=True)


@triton.jit
def update_block(
    grads, masters, exp_avgs, exp_avg_sqs, models, offsets, mask, grad_factor, clip, learning_rate, beta1, beta2, eps,
    weight_decay, correction1, correction2, MASKED: tl.constexpr, HAS_MODEL: tl.constexpr, REMAINDER: tl.constexpr,
):  # fmt: skip
    """One block of one parameter."""
    if MASKED:
        grad = tl.load(grads + offsets, mask=mask, other=0.0).to(tl.float32)
        stored = tl.load(masters + offsets, mask=mask, other=0)
        m = tl.load(exp_avgs + offsets, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(exp_avg_sqs + offsets, mask=mask, other=0.0).to(tl.float32)
        if REMAINDER:
            p = restored_master(tl.load(models + offsets, mask=mask, other=0.0), stored)
        else:
            p = stored
    else:
        grad = tl.load(grads + offsets).to(tl.float32)
        stored = tl.load(masters + offsets)
        m = tl.load(exp_avgs + offsets).to(tl.float32)
        v = tl.load(exp_avg_sqs + offsets).to(tl.float32)
        if REMAINDER:
            p = restored_master(tl.load(models + offsets), stored)
        else:
            p = stored

    g = (grad * grad_factor) * clip
    m = tl.fma(m, beta1, (1.0 - beta1) * g)
    v = tl.fma(v, beta2, ((1.0 - beta2) * g) * g)
    root = tl.sqrt_rn(tl.div_rn(v, correction2)) + eps
    update = tl.fma(p, weight_decay, tl.div_rn(tl.div_rn(m, correction1), root))
    p = tl.fma(update, -learning_rate, p)

    kept = p
    rounded = p.to(tl.bfloat16)
    if REMAINDER:
        bits = p.to(tl.int32, bitcast=True)
        kept = bits.to(tl.int16)
        # Rounded up in magnitude where the low half is 2^15 or more, ties included, so that it can be undone.
        rounded = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if MASKED:
        tl.store(masters + offsets, kept, mask=mask)
        tl.store(exp_avgs + offsets, m.to(exp_avgs.dtype.element_ty), mask=mask)
        tl.store(exp_avg_sqs + offsets, v.to(exp_avg_sqs.dtype.element_ty), mask=mask)
        if HAS_MODEL:
            tl.store(models + offsets, rounded, mask=mask)
    else:
        tl.store(masters + offsets, kept)
        tl.store(exp_avgs + offsets, m.to(exp_avgs.dtype.element_ty))
        tl.store(exp_avg_sqs + offsets, v.to(exp_avg_sqs.dtype.element_ty))
        if HAS_MODEL:
            tl.store(models + offsets, rounded)


@triton.jit
def adam_kernel(
    table, lengths, row_of_chunk, place_of_chunk, grad_factors, clip, learning_rate, beta1, beta2, eps, weight_decay,
    correction1, correction2, GRAD: tl.constexpr, MASTER: tl.constexpr, EXP_AVG: tl.constexpr,
    EXP_AVG_SQ: tl.constexpr, HAS_MODEL: tl.constexpr, REMAINDER: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one parameter."""
    chunk = tl.program_id(0)
    row = tl.load(row_of_chunk + chunk)
    start = tl.load(place_of_chunk + chunk).to(tl.int64) * BLOCK
    left = tl.load(lengths + row) - start
    grad_factor = tl.load(grad_factors)
    grads = address(table, row, 0, 5, GRAD, ALIGNED) + start
    masters = address(table, row, 1, 5, MASTER, ALIGNED) + start
    exp_avgs = address(table, row, 2, 5, EXP_AVG, ALIGNED) + start
    exp_avg_sqs = address(table, row, 3, 5, EXP_AVG_SQ, ALIGNED) + start
    models = address(table, row, 4, 5, tl.bfloat16, ALIGNED) + start
    offsets = tl.arange(0, BLOCK)
    if left >= BLOCK:
        update_block(
            grads, masters, exp_avgs, exp_avg_sqs, models, offsets, None, grad_factor, clip, learning_rate, beta1,
            beta2, eps, weight_decay, correction1, correction2, False, HAS_MODEL, REMAINDER,
        )  # fmt: skip
    else:
        update_block(
            grads, masters, exp_avgs, exp_avg_sqs, models, offsets, offsets < left, grad_factor, clip, learning_rate,
            beta1, beta2, eps, weight_decay, correction1, correction2, True, HAS_MODEL, REMAINDER,
        )  # fmt: skip


@triton.jit
def squared_sum_kernel(
    table, lengths, row_of_chunk, place_of_chunk, factors, sums, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sum of the squares of one chunk of one tensor, times a factor each."""
    chunk = tl.program_id(0)
    row = tl.load(row_of_chunk + chunk)
    first = tl.load(place_of_chunk + chunk).to(tl.int64) * (BLOCK * BLOCKS)
    left = tl.load(lengths + row) - first
    factor = tl.load(factors)
    values = address(table, row, 0, 1, DTYPE, ALIGNED) + first
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(BLOCKS):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        if (block + 1) * BLOCK <= left:
            value = tl.load(values + offsets).to(tl.float32) * factor
            total += value * value
        elif block * BLOCK < left:
            value = tl.load(values + offsets, mask=offsets < left, other=0.0).to(tl.float32) * factor
            total += value * value
    tl.store(sums + chunk, tl.sum(total))


def update_rows(table: TensorTable, grad_factor: Tensor, numbers: AdamStep) -> None:
    """One AdamW update of all rows of a table, in place. Its columns are `COLUMNS`, its rows' dtypes alike.

    Args:
        grad_factor: one FP32 number on the device, multiplied to the gradients before they are clipped.
    """
    grad, master, exp_avg, exp_avg_sq, model = (None if t is None else t.dtype for t in table.rows[0])
    assert model in (None, torch.bfloat16) and (master != torch.int16 or model is not None)
    beta1, beta2 = (float(torch.tensor(beta, dtype=torch.float32)) for beta in (numbers.beta1, numbers.beta2))
    adam_kernel[(table.num_chunks,)](
        table.addresses,
        table.lengths,
        table.row_of_chunk,
        table.place_of_chunk,
        grad_factor,
        numbers.clip,
        numbers.learning_rate,
        numbers.beta1,
        numbers.beta2,
        numbers.eps,
        numbers.weight_decay,
        1.0 - beta1**numbers.step,
        1.0 - beta2**numbers.step,
        GRAD=TRITON_TYPES[grad],
        MASTER=TRITON_TYPES[master],
        EXP_AVG=TRITON_TYPES[exp_avg],
        EXP_AVG_SQ=TRITON_TYPES[exp_avg_sq],
        HAS_MODEL=model is not None,
        REMAINDER=master == torch.int16,
        ALIGNED=table.is_aligned,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def squared_sum(table: TensorTable, factor: Tensor) -> Tensor:
    """Sum over all tensors of a table of (element * factor)^2, an FP64 scalar on the device; not finite if an element
    is not, or if 2^14 squares in a row overflow FP32.

    Args:
        factor: one FP32 number on the device.
    """
    sums = torch.empty(table.num_chunks, dtype=torch.float32, device=table.device)
    squared_sum_kernel[(table.num_chunks,)](
        table.addresses,
        table.lengths,
        table.row_of_chunk,
        table.place_of_chunk,
        factor,
        sums,
        DTYPE=TRITON_TYPES[table.rows[0][0].dtype],
        ALIGNED=table.is_aligned,
        BLOCK=SUM_BLOCK,
        BLOCKS=SUM_BLOCKS,
        num_warps=SUM_WARPS,
    )
    return sums.sum(dtype=torch.float64)
