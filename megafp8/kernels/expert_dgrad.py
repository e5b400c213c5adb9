"""Input gradients of all experts in one launch, of output gradients and weights in two FP8 formats.

PyTorch's FP8 grouped GEMM takes E4M3 times E4M3 only. This one takes E5M2 output gradients, those of `hybrid`. Sizes
stay on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megafp8.kernels.expert_scales import ColumnCodes
from megafp8.kernels.expert_wgrad import GROUP_SIZE_M, MANY_ROWS, PRECISE_TILE, Tile
from megafp8.kernels.routed_rows import RoutedRows

TILES = Tile(128, 128, 128, 4, 3), Tile(128, 256, 128, 8, 4)
"""For few and for many rows of an expert."""


@triton.jit
def _dgrad_kernel(
    grad_output, weights, grad_output_scale, weights_scale, ends, results, N, W, NUM_EXPERTS,
    EXPERTS: tl.constexpr, IS_ROWWISE: tl.constexpr, MAX_IMPRECISE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_SIZE_M: tl.constexpr,
):  # fmt: skip
    # A program computes one tile [BLOCK_M, BLOCK_N] of one expert's rows. Where an expert's tiles begin follows from
    # the end of its rows alone, without a sum over the experts before it: up to expert e there are at most
    # ends[e] // BLOCK_M + e + 1 tiles of rows, which is the number of places that they get.
    num_blocks_n = tl.cdiv(W, BLOCK_N)
    each = tl.arange(0, EXPERTS)
    places = tl.load(ends + each, mask=each < NUM_EXPERTS, other=1 << 30) // BLOCK_M + each + 1
    expert = tl.sum((places <= tl.program_id(0) // num_blocks_n).to(tl.int32))
    if expert >= NUM_EXPERTS:
        return
    start, end = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
    num_blocks_m = tl.cdiv(end - start, BLOCK_M)
    tile = tl.program_id(0) - (start // BLOCK_M + expert) * num_blocks_n
    if tile >= num_blocks_m * num_blocks_n:  # a place without a tile, at most one for each expert
        return
    # Grouped order, see `expert_wgrad.py`.
    first = tile // (GROUP_SIZE_M * num_blocks_n) * GROUP_SIZE_M
    in_group = min(num_blocks_m - first, GROUP_SIZE_M)
    row = start + (first + tile % (GROUP_SIZE_M * num_blocks_n) % in_group) * BLOCK_M
    w = tile % (GROUP_SIZE_M * num_blocks_n) // in_group * BLOCK_N
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for n in tl.range(0, N, BLOCK_K):
        # Rows of the next expert, and weights past W, are multiplied as they are and not stored.
        a, b = grad_output.load([row, n]), weights.load([expert * W + w, n])
        total = tl.dot(a, b.T, total, max_num_imprecise_acc=MAX_IMPRECISE)
    rows, columns = row + tl.arange(0, BLOCK_M), w + tl.arange(0, BLOCK_N)
    if IS_ROWWISE:
        total *= tl.load(grad_output_scale + rows, mask=rows < end)[:, None]
        total *= tl.load(weights_scale + expert * W + columns, mask=columns < W)[None, :]
    else:
        total *= tl.load(grad_output_scale + expert) * tl.load(weights_scale + expert)
    # int64: R x W may exceed 2^31.
    target = results + rows.to(tl.int64)[:, None] * W + columns[None, :]
    tl.store(target, total.to(tl.bfloat16), mask=(rows < end)[:, None] & (columns < W)[None, :])


def dgrad(
    grad_output: Tensor, scale_inv: Tensor, weights: ColumnCodes, rows: RoutedRows, *, is_fast: bool = True
) -> Tensor:
    """grad_output times each expert's weights: BF16 [R, W], uninitialized behind the last expert's rows.

    Args:
        grad_output: E5M2 or E4M3 [R, N].
        scale_inv: its dequantization scales, FP32 [E], or by the rowwise recipe [R].
        weights: transposed codes [E, W, N].
        rows: of the experts.
        is_fast: products may be added with fewer bits.
    """
    num_rows, (num_experts, width, num_outputs) = len(grad_output), weights.codes.shape
    # By the worst case of rows: how many an expert has is not known on the host.
    tile = TILES[num_rows >= MANY_ROWS * num_experts] if is_fast else PRECISE_TILE
    results = grad_output.new_empty(num_rows, width, dtype=torch.bfloat16)
    # At most as many tiles of rows as places, see the kernel.
    grid = ((num_rows // tile.block_m + num_experts) * triton.cdiv(width, tile.block_n),)
    _dgrad_kernel[grid](
        TensorDescriptor.from_tensor(grad_output, [tile.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weights.fp8.view(-1, num_outputs), [tile.block_n, tile.block_k]),
        scale_inv, weights.scale_inv, rows.ends, results, num_outputs, width, num_experts,
        EXPERTS=triton.next_power_of_2(num_experts), IS_ROWWISE=weights.scale_inv.dim() == 2,
        MAX_IMPRECISE=None if is_fast else tile.block_k, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, GROUP_SIZE_M=GROUP_SIZE_M, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return results
