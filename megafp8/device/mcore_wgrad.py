"""Lets megatron-core 0.16.1's own linears add their weight gradient to `main_grad` without Apex, on a CPU too.

They look for the function in Apex's extension module, by name and at import. Without it the gradient is rounded to BF16
and added in a pass of its own. Where Apex is installed, its function is taken; it only adds, so that a buffer whose
first gradient of a step is to replace what is there (`optim.first_gradient`) is cleared before.
"""

from __future__ import annotations

import types
from collections.abc import Callable

from torch import Tensor

from megafp8.device.mcore_cpu import core

NAME = "fused_weight_gradient_mlp_cuda"
FUNCTIONS = ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16")
EVIDENCE = (
    ("tensor_parallel/layers.py", f"import {NAME}"),
    ("tensor_parallel/layers.py", f"{NAME}.wgrad_gemm_accum_fp32("),
)


AddGradient = Callable[[Tensor, Tensor, Tensor], None]
"""Of inputs [T, K], output gradients [T, N] and `main_grad` [N, K], which it changes."""


def provide(add_gradient: AddGradient) -> None:
    """Give megatron-core functions for linears with `gradient_accumulation_fusion`; a second call does nothing.

    Args:
        add_gradient: adds to a buffer, or replaces what is in it where `main_grad.is_overwritten`.
    """
    layers = core("tensor_parallel.layers")
    apex = getattr(layers, NAME, None)
    if not isinstance(apex, types.SimpleNamespace):
        functions = {name: add_gradient if apex is None else overwriting(getattr(apex, name)) for name in FUNCTIONS}
        setattr(layers, NAME, types.SimpleNamespace(**functions))


def overwriting(add: AddGradient) -> AddGradient:
    """Apex's function, for buffers that may be overwritten, too."""

    def add_or_overwrite(inputs: Tensor, grad_outputs: Tensor, main_grad: Tensor) -> None:
        if getattr(main_grad, "is_overwritten", False):
            main_grad.zero_()
        add(inputs, grad_outputs, main_grad)

    return add_or_overwrite
