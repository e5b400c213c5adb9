"""Which of our kernels can replace a Transformer Engine quantizer, the FP8 tensors that they write, and the infinite
amaxes of what Transformer Engine casts itself."""

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
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

from megafp8.kernels import blockwise, delayed, tensorwise
from megafp8.kernels.blockwise import BlockwiseOutput
from megafp8.kernels.delayed import DelayedOutput
from megafp8.kernels.infinities import flag_where_scale_is_one
from megafp8.kernels.rounding import format_spec
from megafp8.kernels.tensorwise import TensorwiseOutput
from megafp8.kernels.tiles import has_complete_tiles
from megafp8.recipes.formats import E4M3, E5M2

Parts = Union[BlockwiseOutput, TensorwiseOutput, DelayedOutput]
INFINITY = "megafp8_infinity"
"""The attribute of a quantizer with the flag that is set if an amax is infinite (`te/counters.py`)."""
CHECKED = (Float8CurrentScalingQuantizer, Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer)
"""The quantizers of which `flag_infinity` finds infinite amaxes."""
E8M0_OF_INFINITY = 0xFE
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
    spec = format_spec(FORMATS[quantizer.dtype.name])
    if isinstance(quantizer, Float8BlockQuantizer):
        return result, BlockwiseOutput(
            row_codes=result._rowwise_data, row_scales=result._rowwise_scale_inv,
            column_codes=result._columnwise_data, column_scales=result._columnwise_scale_inv,
            spec=spec, is_power_of_two=quantizer.force_pow_2_scales, infinity=getattr(quantizer, INFINITY, None),
        )  # fmt: skip
    if result._transpose is not None:
        result._transpose_invalid = False
    if isinstance(quantizer, Float8Quantizer):
        return result, DelayedOutput(
            rows=result._data, columns=result._transpose, scale=quantizer.scale, amax=quantizer.amax,
            scale_inv=result._scale_inv, spec=spec,
        )  # fmt: skip
    return result, TensorwiseOutput(
        rows=result._data, columns=result._transpose, scale_inv=result._scale_inv, spec=spec,
        is_power_of_two=quantizer.force_pow_2_scales, infinity=getattr(quantizer, INFINITY, None),
    )  # fmt: skip


def cast(tensor: Tensor, quantizer: Quantizer, kernels: ModuleType) -> Any:
    """Quantize a tensor by the kernels of `kernels_for`."""
    result, parts = empty_result(quantizer, tensor.shape, tensor.dtype)
    kernels.cast(tensor.contiguous().flatten(0, -2), parts)
    return result


def flag_infinity(quantizer: Quantizer, tensor: Tensor, result: Any) -> None:
    """Set the flag of a quantizer, if it has one, after Transformer Engine's cast of a tensor with an infinite amax.

    Scales and amaxes of the result are read, and the tensor only where they do not tell. The host does not wait.
    """
    flag = getattr(quantizer, INFINITY, None)
    if flag is None:
        return
    if isinstance(quantizer, NVFP4Quantizer):
        amax = result._amax_columnwise if result._amax_rowwise is None else result._amax_rowwise
        flag.masked_fill_(torch.isinf(amax).any(), 1)
        return
    has_rows = isinstance(quantizer, Float8CurrentScalingQuantizer) or result._rowwise_scale_inv is not None
    if isinstance(quantizer, MXFP8Quantizer):
        scales = result._rowwise_scale_inv if has_rows else result._columnwise_scale_inv
        if scales.numel() * 32 == tensor.numel():  # else it has rows and columns that are not written
            flag.masked_fill_(scales.view(torch.uint8).amax() >= E8M0_OF_INFINITY, 1)
            return
    elif has_rows:
        per_tensor = isinstance(quantizer, Float8CurrentScalingQuantizer)
        rows_per_scale = 128 if not per_tensor and quantizer.block_scaling_dim == 2 else 1
        scales = result._scale_inv if per_tensor else result._rowwise_scale_inv
        flag_where_scale_is_one(tensor.contiguous().flatten(0, -2), scales, flag, rows_per_scale)
        return
    flag.masked_fill_(torch.isinf(tensor).any(), 1)
