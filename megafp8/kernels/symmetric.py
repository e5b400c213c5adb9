"""Products of BF16 matrices with their own transposes, which are symmetric: half of the tiles are computed.

    out = beta * added + alpha * a a^T

A program computes one tile of the lower triangle and stores it twice, the second time transposed. That saves half of
the FLOPs of a GEMM. It has not been timed: `pays` is a bound from the number of tiles.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK, BLOCK_K, NUM_WARPS, NUM_STAGES = 128, 64, 8, 3
"""A program computes BLOCK x BLOCK results and sums BLOCK_K columns at a time."""
LEAST_TILES = 512
"""From so many tiles on, each of 132 multiprocessors has at least four: with one or two, the last one idles for as long
as the saved half takes. One matrix has them from 4,096 rows on."""


@triton.jit
def symmetric_kernel(a, added, out, M, K, alpha, beta, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """One tile of the lower triangle of one matrix of a stack; `a`: [matrices * M, K], `out`: [matrices, M, M]."""
    num_blocks = tl.cdiv(M, BLOCK)
    num_tiles = num_blocks * (num_blocks + 1) // 2
    matrix, tile = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    # Row i of tiles begins with tile i (i + 1) / 2. The root is rounded: it may be one off.
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    j = tile - i * (i + 1) // 2
    # Rows behind the last one are those of the next matrix or zeros, and are not stored. Columns behind the last one
    # are zeros.
    row, column = matrix * M + i * BLOCK, matrix * M + j * BLOCK
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        total = tl.dot(a.load([row, k]), a.load([column, k]).T, total)
    total *= alpha
    rows, columns = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    is_inside = (rows < M)[:, None] & (columns < M)[None, :]
    first = matrix.to(tl.int64) * M * M
    if added is not None:
        at = added + first + rows[:, None] * M + columns[None, :]
        total += beta * tl.load(at, mask=is_inside, other=0.0).to(tl.float32)
    result = total.to(tl.bfloat16)  # rounded once
    tl.store(out + first + rows[:, None] * M + columns[None, :], result, mask=is_inside)
    if i != j:
        is_inside = (columns < M)[:, None] & (rows < M)[None, :]
        tl.store(out + first + columns[:, None] * M + rows[None, :], result.T, mask=is_inside)


def pays(a: Tensor) -> bool:
    """Whether `a`, [..., M, K], is large enough. The copy engine wants rows of a multiple of 16 bytes."""
    num_rows, num_columns = a.shape[-2:]
    num_blocks = triton.cdiv(num_rows, BLOCK)
    num_tiles = a.shape[:-2].numel() * num_blocks * (num_blocks + 1) // 2
    is_aligned = num_rows % 8 == 0 and num_columns % 8 == 0
    return a.dtype == torch.bfloat16 and is_aligned and num_tiles >= LEAST_TILES


def multiply_by_transpose(
    a: Tensor, added: Optional[Tensor] = None, *, alpha: float = 1.0, beta: float = 0.0
) -> Tensor:  # fmt: skip
    """beta * added + alpha * a a^T, of each matrix of a stack.

    Args:
        a: BF16 [M, K] or [matrices, M, K]; M and K are multiples of 8.
        added: BF16 [..., M, M], contiguous and symmetric; only its lower triangle is read.

    Returns:
        BF16 [..., M, M], exactly symmetric outside the tiles of the diagonal. Sums are in FP32.
    """
    num_rows, num_columns = a.shape[-2:]
    out = a.new_empty(*a.shape[:-1], num_rows)
    stacked = a.reshape(-1, num_columns).contiguous()  # a turned matrix has its columns in rows
    num_blocks = triton.cdiv(num_rows, BLOCK)
    grid = (len(stacked) // num_rows * num_blocks * (num_blocks + 1) // 2,)
    symmetric_kernel[grid](
        TensorDescriptor.from_tensor(stacked, [BLOCK, BLOCK_K]), added, out, num_rows, num_columns, alpha, beta,
        BLOCK=BLOCK, BLOCK_K=BLOCK_K, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out
