"""Transformer Engine's fused MLP with SwiGLU's own kernels where they save a pass."""

from __future__ import annotations

from typing import Any, Optional

import transformer_engine.pytorch as te
from megatron.core.extensions.transformer_engine import TEFusedMLP
from torch import Tensor
from transformer_engine.pytorch.tensor import Quantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

from megafp8.model import block_kernels
from megafp8.model.swiglu_kernel import swiglu, swiglu_backward
from megafp8.model.te_quantize import blocks_of, parts_of, takes_blocks


class QuantizingSwiGLU(te.ops.SwiGLU):
    """SwiGLU that makes both FP8 copies of its result at once: each way under delayed scaling, forward in blocks; else
    Transformer Engine's."""

    def _tex_swiglu_forward(self, input_: Tensor, quantizer: Optional[Quantizer]) -> Tensor:
        shape = [*input_.shape[:-1], input_.shape[-1] // 2]
        if isinstance(quantizer, Float8Quantizer):
            result = quantizer.make_empty(shape, dtype=input_.dtype)
            swiglu(input_, *parts_of(result, quantizer))
        elif takes_blocks(quantizer, shape):
            result = quantizer.make_empty(shape, dtype=input_.dtype)
            block_kernels.swiglu(input_.flatten(0, -2), blocks_of(result, quantizer))
        else:
            result = super()._tex_swiglu_forward(input_, quantizer)
        return result

    def _tex_swiglu_backward(self, grad_output: Tensor, input_: Tensor, quantizer: Optional[Quantizer]) -> Tensor:
        if not isinstance(quantizer, Float8Quantizer):
            return super()._tex_swiglu_backward(grad_output, input_, quantizer)
        result = quantizer.make_empty(input_.shape, dtype=input_.dtype)
        swiglu_backward(grad_output.flatten(0, -2), input_, *parts_of(result, quantizer))
        return result


class FusedMLP(TEFusedMLP):
    """megatron-core's, with that SwiGLU."""

    def _make_activation_op(self, *args: Any, **options: Any) -> te.ops.FusibleOperation:
        operation = super()._make_activation_op(*args, **options)
        return QuantizingSwiGLU() if type(operation) is te.ops.SwiGLU else operation
