"""Rows times the weights of their experts in one launch, in FP8: forward pass and input gradients.

PyTorch's FP8 grouped GEMM takes E4M3 times E4M3 only, with a scale for each row. This one takes the scale of an expert,
and E5M2 output gradients, those of `hybrid`; at the shapes of `benchmarks/gpu_experts.py` it is 1.03 to 1.58 times as
fast on an H200. Sizes stay on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megafp8.kernels.expert_wgrad import BLOCKS, BLOCKS_TILE, GROUP_SIZE_M, PRECISE_TILE, ROWS, TENSORS, Tile
from megafp8.kernels.routed_rows import RoutedRows

WIDE = 16384
"""From so many results of a row on, large tiles pay: they read each operand less often. In narrower ones two small
programs of a multiprocessor hide the stores of their results from each other."""
TILES = Tile(128, 128, 128, 4, 3), Tile(128, 256, 128, 8, 3)
"""For narrow and for wide results."""


@triton.jit
def _product_kernel(
    inputs, weights, inputs_scale, weights_scale, ends, results, num_rows, N, W, NUM_EXPERTS,
    EXPERTS: tl.constexpr, SCALES: tl.constexpr, MAX_IMPRECISE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_SIZE_M: tl.constexpr,
):  # fmt: skip
    # The numbers of tiles of all experts are computed once in each program, which then takes every n-th tile [BLOCK_M,
    # BLOCK_N]. Experts are the slowest index, so that tiles that are computed at the same time share their operands.
    num_blocks_n = tl.cdiv(W, BLOCK_N)
    each = tl.arange(0, EXPERTS)
    is_expert = each < NUM_EXPERTS
    all_ends = tl.load(ends + each, mask=is_expert, other=0)
    starts = tl.load(ends + each - 1, mask=is_expert & (each > 0), other=0)
    blocks = tl.where(is_expert, tl.cdiv(all_ends - starts, BLOCK_M), 0)
    behind = tl.cumsum(blocks)
    # Flattened, the loads of a tile begin while the results of the last one are stored.
    for number in tl.range(tl.program_id(0), tl.sum(blocks) * num_blocks_n, tl.num_programs(0), flatten=True):
        # The experts before that of the tile, whose rows end where those of the tile's expert begin.
        is_before = (behind <= number // num_blocks_n) & is_expert
        expert = tl.sum(is_before.to(tl.int32))
        start = tl.max(tl.where(is_before, all_ends, 0))
        end = tl.sum(tl.where(each == expert, all_ends, 0))
        # Grouped order, see `expert_wgrad.py`.
        tile = number - tl.sum(tl.where(is_before, blocks, 0)) * num_blocks_n
        first = tile // (GROUP_SIZE_M * num_blocks_n) * GROUP_SIZE_M
        in_group = min(tl.cdiv(end - start, BLOCK_M) - first, GROUP_SIZE_M)
        row = start + (first + tile % (GROUP_SIZE_M * num_blocks_n) % in_group) * BLOCK_M
        w = tile % (GROUP_SIZE_M * num_blocks_n) // in_group * BLOCK_N
        rows, columns = row + tl.arange(0, BLOCK_M), w + tl.arange(0, BLOCK_N)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for n in tl.range(0, N, BLOCK_K):
            # Rows of the next expert, and weights past W, are multiplied as they are and not stored.
            a, b = inputs.load([row, n]), weights.load([expert * W + w, n])
            if SCALES == BLOCKS:
                # A product of blocks has one scale for each row: it is added after it has been multiplied with it. The
                # scales of inputs are [N / 128, R], those of weights [E, W / 128, N / 128].
                scale = tl.load(inputs_scale + n // BLOCK_K * num_rows + rows, mask=rows < end)
                of_weights = (expert * num_blocks_n + w // BLOCK_N) * (N // BLOCK_K) + n // BLOCK_K
                total += tl.dot(a, b.T) * (scale * tl.load(weights_scale + of_weights))[:, None]
            else:
                total = tl.dot(a, b.T, total, max_num_imprecise_acc=MAX_IMPRECISE)
        if SCALES == ROWS:
            total *= tl.load(inputs_scale + rows, mask=rows < end)[:, None]
            total *= tl.load(weights_scale + expert * W + columns, mask=columns < W)[None, :]
        elif SCALES == TENSORS:
            total *= tl.load(inputs_scale + expert) * tl.load(weights_scale + expert)
        # int64: R x W may exceed 2^31.
        target = results + rows.to(tl.int64)[:, None] * W + columns[None, :]
        tl.store(target, total.to(tl.bfloat16), mask=(rows < end)[:, None] & (columns < W)[None, :])


def product(
    inputs: Tensor, scale_inv: Tensor, weights: Tensor, weights_scale_inv: Tensor, rows: RoutedRows, *,
    is_fast: bool = True,
) -> Tensor:  # fmt: skip
    """inputs times each expert's weights, transposed: BF16 [R, W], uninitialized behind the last expert's rows.

    Args:
        inputs: E4M3 or E5M2 [R, N].
        scale_inv: its dequantization scales, FP32 [E], by the rowwise recipe [R], by the blockwise one [N / 128, R].
        weights: E4M3 or E5M2 [E, W, N].
        weights_scale_inv: FP32 [E], by the rowwise recipe [E, W], by the blockwise one [E, W / 128, N / 128].
        rows: of the experts.
        is_fast: products may be added with fewer bits.
    """
    num_experts, width, length = weights.shape
    kind = weights_scale_inv.dim() - 1
    tile = BLOCKS_TILE if kind == BLOCKS.value else TILES[width >= WIDE] if is_fast else PRECISE_TILE
    results = inputs.new_empty(len(inputs), width, dtype=torch.bfloat16)
    _product_kernel[(num_programs(tile, inputs.device),)](
        TensorDescriptor.from_tensor(inputs, [tile.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weights.view(-1, length), [tile.block_n, tile.block_k]),
        scale_inv, weights_scale_inv, rows.ends, results, len(inputs), length, width, num_experts,
        EXPERTS=triton.next_power_of_2(num_experts), SCALES=kind,
        MAX_IMPRECISE=None if is_fast else tile.block_k, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, GROUP_SIZE_M=GROUP_SIZE_M, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return results


def num_programs(tile: Tile, device: torch.device) -> int:
    """Programs that a GPU runs at the same time: eight warps on each multiprocessor."""
    if device.type != "cuda":  # Triton's interpreter, which runs one after the other
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count * 8 // tile.warps
