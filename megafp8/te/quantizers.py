"""Which of our kernels can replace a Transformer Engine quantizer, and the FP8 tensors that they write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Optional, Union

import torch
from torch import Tensor
from transformer_engine.pytorch.tensor import Quantizer
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

from megafp8.kernels import blockwise, delayed, tensorwise
from megafp8.kernels.blockwise import BlockwiseOutput
from megafp8.kernels.delayed import DelayedOutput
from megafp8.kernels.rounding import grid_of
from megafp8.kernels.tensorwise import TensorwiseOutput
from megafp8.kernels.tiles import has_complete_tiles
from megafp8.recipes.formats import E4M3, E5M2

Parts = Union[BlockwiseOutput, TensorwiseOutput, DelayedOutput]
INFINITY = "megafp8_infinity"
"""The attribute of a quantizer with the flag that the kernels set if an amax is infinite (`te/counters.py`)."""
# By the names of Transformer Engine's DType.
FORMATS = {"kFloat8E4M3": E4M3, "kFloat8E5M2": E5M2}


def kernels_for(quantizer: Optional[Quantizer], shape: Sequence[int]) -> Optional[ModuleType]:
    """The module of kernels that can replace a quantizer for a tensor of this shape; None if there is none."""
    if not has_complete_tiles(math.prod(shape[:-1]), shape[-1]):
        return None
    kernels = None
    if isinstance(quantizer, Float8Quantizer):
        kernels = delayed
    elif isinstance(quantizer, Float8BlockQuantizer) and quantizer.block_scaling_dim == 1:
        kernels = blockwise
    elif isinstance(quantizer, Float8CurrentScalingQuantizer) and not quantizer.with_amax_reduction:
        kernels = tensorwise
    return kernels


def empty_result(quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype) -> tuple[Any, Parts]:
    """An uninitialized quantized tensor, and its parts that the kernels of `kernels_for` write."""
    result = quantizer.make_empty(shape, dtype=dtype)
    grid = grid_of(FORMATS[quantizer.dtype.name])
    if isinstance(quantizer, Float8BlockQuantizer):
        return result, BlockwiseOutput(
            row_codes=result._rowwise_data, row_scales=result._rowwise_scale_inv,
            column_codes=result._columnwise_data, column_scales=result._columnwise_scale_inv,
            grid=grid, is_power_of_two=quantizer.force_pow_2_scales, infinity=getattr(quantizer, INFINITY, None),
        )  # fmt: skip
    if result._transpose is not None:
        result._transpose_invalid = False
    if isinstance(quantizer, Float8Quantizer):
        return result, DelayedOutput(
            rows=result._data, columns=result._transpose, scale=quantizer.scale, amax=quantizer.amax,
            scale_inv=result._scale_inv, grid=grid,
        )  # fmt: skip
    return result, TensorwiseOutput(
        rows=result._data, columns=result._transpose, scale_inv=result._scale_inv, grid=grid,
        is_power_of_two=quantizer.force_pow_2_scales, infinity=getattr(quantizer, INFINITY, None),
    )  # fmt: skip


def cast(tensor: Tensor, quantizer: Quantizer, kernels: ModuleType) -> Any:
    """Quantize a tensor by the kernels of `kernels_for`."""
    result, parts = empty_result(quantizer, tensor.shape, tensor.dtype)
    kernels.cast(tensor.contiguous().flatten(0, -2), parts)
    return result
