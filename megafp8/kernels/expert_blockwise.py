"""Casts of the rows of experts to blockwise FP8: gathered tokens, weighted SwiGLU, its gradients, and weights.

Blocks of 1 x 128 along the sum of the forward and input-gradient GEMM, and of 128 rows along that of the weight
gradient; of weights 128 x 128. The rows of an expert are a multiple of 128 (`ALIGNMENT`), so that a tile has complete
blocks of one expert, and tiles exchange nothing. A tile is quantized as in `blockwise.py`, but without rounding to BF16
before. Each cast is one launch; the gradients of SwiGLU are written in BF16 by a first one.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.kernels import expert_casts
from megafp8.kernels.blockwise import scales_of, store_tile
from megafp8.kernels.delayed import largest_of
from megafp8.kernels.expert_scales import CurrentScale, RowColumnCodes
from megafp8.kernels.experts import EXPERT_BLOCK, gathered_tile, swiglu_tile
from megafp8.kernels.rounding import FormatSpec, code_dtype
from megafp8.kernels.routed_rows import RoutedRows
from megafp8.kernels.tiles import BLOCK_SIZE, load_tile, store_codes, tile_offset

ALIGNMENT = BLOCK_SIZE
LARGEST = torch.finfo(torch.bfloat16).max
"""Replaces a scale that overflows, see `quant_scale_of`."""


@triton.jit
def cast_kernel(
    inputs, token_of_row, probs, expert_of_block, ends, num_rows, width, on_overflow, row_codes, row_scales,
    column_codes, column_scales, infinities, NUM_EXPERTS: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Codes [R, W] of the tokens of rows [T, W], of p silu(a) b with inputs [R, 2 W] and probs [R], or of inputs [R, W]
    where both are None. A program has one tile."""
    tile_column, tile_row = tl.program_id(0), tl.program_id(1)
    # The grid has the rows of the worst case.
    if tile_row * BLOCK_SIZE >= tl.load(ends + NUM_EXPERTS - 1):
        return
    if token_of_row is not None:
        y = gathered_tile(inputs, token_of_row, tile_row, tile_column, width, BLOCK_SIZE)
    elif probs is not None:
        y = swiglu_tile(inputs, probs, tile_row, tile_column, width, BLOCK_SIZE)
    else:
        y = load_tile(inputs + tile_offset(tile_row, tile_column, width, BLOCK_SIZE), width, BLOCK_SIZE)
    if infinities is not None:
        infinities += tl.load(expert_of_block + tile_row * (BLOCK_SIZE // EXPERT_BLOCK))
    store_tile(
        y, tile_row, tile_column, num_rows, width, on_overflow, row_codes, row_scales, column_codes, column_scales,
        infinities, POWER_OF_TWO, FORMAT, BLOCK_SIZE,
    )  # fmt: skip


@triton.jit
def weights_kernel(
    weights, num_rows, width, on_overflow, rows, columns, row_scales, column_scales, infinities,
    POWER_OF_TWO: tl.constexpr, FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Codes of weights [E, N, W] and of their transpose. A program has one tile, which is one block."""
    tile_column, tile_row, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    start = expert * num_rows * width
    y = load_tile(weights + start + tile_offset(tile_row, tile_column, width, BLOCK_SIZE), width, BLOCK_SIZE)
    largest = largest_of(y)
    scale, inverse = scales_of(largest, on_overflow, POWER_OF_TWO, FORMAT)
    num_down, num_across = num_rows // BLOCK_SIZE, width // BLOCK_SIZE
    first = expert * num_down * num_across
    tl.store(row_scales + first + tile_row * num_across + tile_column, inverse)
    tl.store(column_scales + first + tile_column * num_down + tile_row, inverse)
    if infinities is not None:
        tl.store(infinities + expert, 1, mask=largest == float("inf"))
    store_codes(y, scale, tile_row, tile_column, num_rows, width, rows + start, columns + start, FORMAT, BLOCK_SIZE)


class BlockwiseCasts:
    """The casts of a run.

    Args:
        is_power_of_two: of the scales; else they are FP32.
    """

    def __init__(self, is_power_of_two: bool):
        self.is_power_of_two = is_power_of_two

    def gather_codes(
        self, inputs: Tensor, rows: RoutedRows, routing_map: Tensor, spec: FormatSpec, prequantized: None = None,
        scale: CurrentScale = CurrentScale(),
    ) -> RowColumnCodes:  # fmt: skip
        """Quantize the token of each row: inputs BF16 [T, W] to codes [R, W]. The routing map is not read."""
        return self._cast(inputs, rows, inputs.shape[1], spec, scale, is_gathered=True)

    def swiglu_codes(
        self, inputs: Tensor, probs: Tensor, rows: RoutedRows, spec: FormatSpec, scale: CurrentScale = CurrentScale()
    ) -> RowColumnCodes:
        """The codes of `expert_casts.swiglu`, whose result is not rounded to BF16 before."""
        return self._cast(inputs, rows, inputs.shape[1] // 2, spec, scale, probs=probs)

    def swiglu_backward_codes(
        self, gradients: Tensor, inputs: Tensor, probs: Tensor, rows: RoutedRows, spec: FormatSpec,
        scale: CurrentScale = CurrentScale(),
    ) -> tuple[RowColumnCodes, Tensor]:  # fmt: skip
        """Codes of the gradients of inputs, in BF16, and the gradients of probs."""
        # In one kernel a tile of 128 x 128 of both halves and the gradients would not fit into registers.
        results, prob_gradients = expert_casts.swiglu_backward(gradients, inputs, probs, rows)
        return self._cast(results, rows, results.shape[1], spec, scale), prob_gradients

    def _cast(
        self, inputs: Tensor, rows: RoutedRows, width: int, spec: FormatSpec, scale: CurrentScale,
        is_gathered: bool = False, probs: Optional[Tensor] = None,
    ) -> RowColumnCodes:  # fmt: skip
        num_rows, blocks = len(rows.token_of_row), (width // BLOCK_SIZE, len(rows.token_of_row) // BLOCK_SIZE)
        codes = RowColumnCodes(
            inputs.new_empty(num_rows, width, dtype=torch.uint8),
            inputs.new_empty(width, num_rows, dtype=torch.uint8),
            inputs.new_empty(blocks[0], num_rows, dtype=torch.float32),
            inputs.new_empty(blocks[1], 1, width, dtype=torch.float32),
            code_dtype(spec),
        )
        cast_kernel[blocks](
            inputs, rows.token_of_row if is_gathered else None, probs, rows.expert_of_block, rows.ends, num_rows, width,
            LARGEST, codes.rows, codes.row_scale_inv, codes.columns, codes.column_scale_inv, scale.infinities,
            NUM_EXPERTS=len(rows.ends), POWER_OF_TWO=self.is_power_of_two, FORMAT=spec, BLOCK_SIZE=BLOCK_SIZE,
            num_warps=8,
        )  # fmt: skip
        return codes

    def weight_codes(self, weights: Tensor, spec: FormatSpec, scale: CurrentScale = CurrentScale()) -> RowColumnCodes:
        """Codes of weights [E, N, W] BF16."""
        num_experts, num_rows, width = weights.shape
        down, across = num_rows // BLOCK_SIZE, width // BLOCK_SIZE
        codes = RowColumnCodes(
            torch.empty_like(weights, dtype=torch.uint8),
            weights.new_empty(num_experts, width, num_rows, dtype=torch.uint8),
            weights.new_empty(num_experts, down, across, dtype=torch.float32),
            weights.new_empty(num_experts, across, down, dtype=torch.float32),
            code_dtype(spec),
        )
        weights_kernel[(across, down, num_experts)](
            weights, num_rows, width, LARGEST, *codes[:4], scale.infinities, POWER_OF_TWO=self.is_power_of_two,
            FORMAT=spec, BLOCK_SIZE=BLOCK_SIZE, num_warps=8,
        )  # fmt: skip
        return codes
