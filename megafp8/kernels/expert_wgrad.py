"""Weight gradients of all experts in one launch, added to FP32 in the GEMM.

PyTorch's grouped GEMMs write them in BF16, and a second kernel reads and adds them: 12 bytes for each weight and
microbatch. Here they are added as they leave the GEMM, in FP32: 8 bytes. Sizes stay on the device.
"""

from __future__ import annotations

from typing import NamedTuple, Union

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megafp8.kernels.expert_scales import ColumnCodes
from megafp8.kernels.routed_rows import RoutedRows


class Tile(NamedTuple):
    """What a program computes: `block_m` x `block_n` weight gradients, `block_k` rows at a time."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


MANY_ROWS = 4096
"""From so many rows of an expert on, large tiles pay. With fewer, reading and writing FP32 takes a larger part of the
time, and two small programs of a multiprocessor hide it from each other."""
BF16_TILES = Tile(128, 128, 32, 4, 4), Tile(128, 256, 64, 8, 3)
"""For few and for many rows. The fastest of 14 to 17 for each shape of `benchmarks/gpu_experts.py` on an H200."""
FP8_TILE = Tile(128, 256, 128, 8, 3)
"""The fastest of 44: the copy engine adds while the multiprocessor goes on, so that few rows need no small tiles."""
PRECISE_TILE = Tile(128, 128, 128, 8, 4)
"""Where FP8 products are added with all bits: registers hold a second sum, of one block of rows."""
BLOCKS_TILE = Tile(128, 128, 128, 8, 4)
"""Where blocks have scales: registers hold a second sum, of one block."""
TENSORS, ROWS, BLOCKS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What has a scale: an expert's numbers; each row and column; blocks of 128 of them (`expert_blockwise.py`). One less
than the dimensions of the scales (`ColumnCodes`)."""
GROUP_SIZE_M = 8
"""Tiles of so many rows of a weight follow each other for each tile of columns, so that the L2 cache keeps them."""


@triton.jit
def _wgrad_kernel(
    grad_output, inputs, grad_output_scale, inputs_scale, ends, main_grad, added_to, N, W,
    IS_FP8: tl.constexpr, SCALES: tl.constexpr, MAX_IMPRECISE: tl.constexpr, IS_OVERWRITTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_SIZE_M: tl.constexpr,
):  # fmt: skip
    # A program computes one tile [BLOCK_M, BLOCK_N] of one expert's weight gradients. Experts are the slowest index, so
    # that programs that run at the same time share their operands.
    num_blocks_m, num_blocks_n = tl.cdiv(N, BLOCK_M), tl.cdiv(W, BLOCK_N)
    expert, tile = tl.program_id(0) // (num_blocks_m * num_blocks_n), tl.program_id(0) % (num_blocks_m * num_blocks_n)
    # Grouped order: GROUP_SIZE_M tiles of rows go down before the next tile of columns, so that their operands are
    # still in the L2 cache. The last group may have fewer tiles.
    first = tile // (GROUP_SIZE_M * num_blocks_n) * GROUP_SIZE_M
    in_group = min(num_blocks_m - first, GROUP_SIZE_M)
    n = (first + tile % (GROUP_SIZE_M * num_blocks_n) % in_group) * BLOCK_M
    w = tile % (GROUP_SIZE_M * num_blocks_n) // in_group * BLOCK_N
    # The number of rows of an expert is known on the device only, so that the loop has a dynamic end. An expert without
    # rows stores or adds zeros.
    start, end = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
    whole = start + (end - start) // BLOCK_K * BLOCK_K
    rows, columns = n + tl.arange(0, BLOCK_M), w + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Only complete blocks of rows: they need no mask, and the compiler pipelines the loop.
    for row in tl.range(start, whole, BLOCK_K):
        # A descriptor's load gives zeros outside the tensor, so that the edges of N and W need no masks here.
        if SCALES == BLOCKS:
            # Scales [R / 128, N] and [R / 128, W]. All blocks are complete: an expert's rows are a multiple of 128.
            a, b, block = grad_output.load([n, row]), inputs.load([w, row]), row // BLOCK_K
            of_rows = tl.load(grad_output_scale + block * N + rows, mask=rows < N)
            of_columns = tl.load(inputs_scale + block * W + columns, mask=columns < W)
            total += tl.dot(a, b.T) * of_rows[:, None] * of_columns[None, :]
        elif IS_FP8:
            # FP8 tensor cores take operands that are contiguous along the sum, which are the transposed codes [N, R]
            # and [W, R].
            a, b = grad_output.load([n, row]), inputs.load([w, row])
            total = tl.dot(a, b.T, total, max_num_imprecise_acc=MAX_IMPRECISE)
        else:
            total = tl.dot(grad_output.load([row, n]).T, inputs.load([row, w]), total)
    if SCALES != BLOCKS and whole < end:  # the rows of the next expert count as zeros, whatever they are
        # The next expert's rows follow in the same block. Both operands are masked: NaN or infinity in one times 0 in
        # the other would be NaN.
        live = whole + tl.arange(0, BLOCK_K) < end
        if IS_FP8:
            # Masked as bytes: byte 0 is the number 0. Back to the format of each operand, which may differ.
            a, b = grad_output.load([n, whole]), inputs.load([w, whole])
            a_bytes = tl.where(live[None, :], a.to(tl.uint8, bitcast=True), 0)
            b_bytes = tl.where(live[None, :], b.to(tl.uint8, bitcast=True), 0)
            a, b = a_bytes.to(a.dtype, bitcast=True), b_bytes.to(b.dtype, bitcast=True)
            total = tl.dot(a, b.T, total, max_num_imprecise_acc=MAX_IMPRECISE)
        else:
            a = tl.where(live[:, None], grad_output.load([whole, n]), 0.0).to(tl.bfloat16)
            b = tl.where(live[:, None], inputs.load([whole, w]), 0.0).to(tl.bfloat16)
            total = tl.dot(a.T, b, total)
    # One scale for all rows of an expert, or of each of their columns: it can be taken out of the sum.
    if SCALES == ROWS:
        total *= tl.load(grad_output_scale + expert * N + rows, mask=rows < N)[:, None]
        total *= tl.load(inputs_scale + expert * W + columns, mask=columns < W)[None, :]
    elif SCALES == TENSORS and IS_FP8:
        total *= tl.load(grad_output_scale + expert) * tl.load(inputs_scale + expert)
    if added_to is not None:
        # The copy engine stores or adds, and leaves out what is outside. In two parts, because a whole tile in FP32
        # does not fit beside the operands. No other program has this tile, so that the sum has a fixed order.
        left, right = total.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
        left, right = left.reshape(1, BLOCK_M, BLOCK_N // 2), right.reshape(1, BLOCK_M, BLOCK_N // 2)
        if IS_OVERWRITTEN:
            added_to.store([expert, n, w], left)
            added_to.store([expert, n, w + BLOCK_N // 2], right)
        else:
            added_to.atomic_add([expert, n, w], left)
            added_to.atomic_add([expert, n, w + BLOCK_N // 2], right)
    else:
        is_inside = (rows < N)[:, None] & (columns < W)[None, :]
        # int64: E x N x W may exceed 2^31. Within one expert int32 is enough.
        target = main_grad + expert.to(tl.int64) * N * W + rows[:, None] * W + columns[None, :]
        if not IS_OVERWRITTEN:
            # No other program has this tile: load, add and store need no atomic operation.
            total += tl.load(target, mask=is_inside, other=0.0)
        tl.store(target, total, mask=is_inside)


Operand = Union[Tensor, ColumnCodes]


def add_wgrad(
    main_grad: Tensor, grad_output: Operand, inputs: Operand, rows: RoutedRows, *, is_fast: bool = True,
    is_overwritten: bool,
) -> None:  # fmt: skip
    """Add grad_output transposed times inputs, of each expert's rows, or overwrite main_grad with it.

    Args:
        main_grad: [E, N, W], contiguous, FP32 or BF16; sums are in FP32.
        grad_output: BF16 [R, N], or E4M3 or E5M2 codes [N, R] with a scale for each expert, or by the rowwise recipe
            for each column of its rows, or by the blockwise one for 128 of its rows.
        inputs: BF16 [R, W], or codes [W, R].
        rows: of the experts.
        is_fast: FP8 products may be added with fewer bits.
        is_overwritten: main_grad holds nothing yet.
    """
    num_experts, n, w = main_grad.shape
    # By the worst case of rows: how many an expert has is not known on the host.
    has_many = rows.token_of_row.numel() >= MANY_ROWS * num_experts
    if isinstance(grad_output, ColumnCodes) and isinstance(inputs, ColumnCodes):
        kind = grad_output.scale_inv.dim() - 1
        tile = BLOCKS_TILE if kind == BLOCKS.value else FP8_TILE if is_fast else PRECISE_TILE
        a, b, is_fp8 = grad_output.fp8, inputs.fp8, True
        a_scale, b_scale = grad_output.scale_inv, inputs.scale_inv
        # What one load of a descriptor takes: [BLOCK_M, BLOCK_K] of codes [N, R]; of BF16 [R, N] the transpose.
        blocks = [tile.block_m, tile.block_k], [tile.block_n, tile.block_k]
    else:
        a, b, a_scale, b_scale, is_fp8, tile = grad_output, inputs, None, None, False, BF16_TILES[has_many]
        kind = TENSORS.value
        blocks = [tile.block_k, tile.block_m], [tile.block_k, tile.block_n]
    # Triton's interpreter has no such additions, and the copy engine needs 16 bytes.
    has_copies = main_grad.is_cuda and main_grad.data_ptr() % 16 == 0 and w % 4 == 0
    is_added_by_copies = has_copies and is_fp8 and is_fast and main_grad.dtype == torch.float32
    half = [1, tile.block_m, tile.block_n // 2]
    added_to = TensorDescriptor.from_tensor(main_grad, half) if is_added_by_copies else None
    # One dimension: the kernel divides the index itself, in the order that the L2 cache needs.
    grid = (triton.cdiv(n, tile.block_m) * triton.cdiv(w, tile.block_n) * num_experts,)
    _wgrad_kernel[grid](
        TensorDescriptor.from_tensor(a, blocks[0]), TensorDescriptor.from_tensor(b, blocks[1]), a_scale, b_scale,
        rows.ends, main_grad, added_to, n, w, IS_FP8=is_fp8, SCALES=kind,
        MAX_IMPRECISE=None if is_fast else tile.block_k, IS_OVERWRITTEN=is_overwritten, BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_SIZE_M=GROUP_SIZE_M, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
