"""Transformer Engine's fused MLP with SwiGLU's own kernels where they save a pass."""

from __future__ import annotations

from typing import Any, Optional

import torch
import transformer_engine.pytorch as te
from megatron.core.extensions.transformer_engine import TEFusedMLP
from torch import Tensor
from transformer_engine.pytorch.tensor import Quantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

from megafp8.model.swiglu_kernel import swiglu, swiglu_backward

# Transformer Engine counts FP8 formats on its own.
FP8_DTYPES = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


class QuantizingSwiGLU(te.ops.SwiGLU):
    """SwiGLU that makes both FP8 copies of its result at once, under delayed scaling; else Transformer Engine's."""

    def _tex_swiglu_forward(self, input_: Tensor, quantizer: Optional[Quantizer]) -> Tensor:
        if not isinstance(quantizer, Float8Quantizer):
            return super()._tex_swiglu_forward(input_, quantizer)
        result = quantizer.make_empty([*input_.shape[:-1], input_.shape[-1] // 2], dtype=input_.dtype)
        swiglu(input_, *parts_of(result, quantizer))
        return result

    def _tex_swiglu_backward(self, grad_output: Tensor, input_: Tensor, quantizer: Optional[Quantizer]) -> Tensor:
        if not isinstance(quantizer, Float8Quantizer):
            return super()._tex_swiglu_backward(grad_output, input_, quantizer)
        result = quantizer.make_empty(input_.shape, dtype=input_.dtype)
        swiglu_backward(grad_output.flatten(0, -2), input_, *parts_of(result, quantizer))
        return result


def parts_of(result: Any, quantizer: Float8Quantizer) -> tuple[Tensor, Optional[Tensor], Tensor, Tensor, Tensor]:
    """What the kernels write of an FP8 tensor, and its scale: rows [T, W], columns [W, T], scale, amax, 1 / scale."""
    dtype = FP8_DTYPES[quantizer.dtype.name]
    rows = result._data.view(dtype).flatten(0, -2)
    columns = None
    if result._transpose is not None:
        columns = result._transpose.view(dtype).flatten(1)
        result._transpose_invalid = False
    return rows, columns, quantizer.scale, quantizer.amax, result._scale_inv


class FusedMLP(TEFusedMLP):
    """megatron-core's, with that SwiGLU."""

    def _make_activation_op(self, *args: Any, **options: Any) -> te.ops.FusibleOperation:
        operation = super()._make_activation_op(*args, **options)
        return QuantizingSwiGLU() if type(operation) is te.ops.SwiGLU else operation
