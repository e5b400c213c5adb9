"""Lets megatron-core 0.16.1's own linear, the output layer, add its weight gradient to `main_grad` without Apex.

It looks for the function in Apex's extension module, by name and at import. Without it the gradient is rounded to BF16
and added in a pass of its own. Where Apex is installed, nothing is changed.
"""

from __future__ import annotations

import types
from collections.abc import Callable

from torch import Tensor

from megafp8.device.mcore_cpu import core

NAME = "fused_weight_gradient_mlp_cuda"
EVIDENCE = (
    ("tensor_parallel/layers.py", f"import {NAME}"),
    ("tensor_parallel/layers.py", f"{NAME}.wgrad_gemm_accum_fp32("),
)


def provide(add_gradient: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    """Give megatron-core a function for linears with `gradient_accumulation_fusion`; a second call does nothing.

    Args:
        add_gradient: of inputs [T, K], output gradients [T, N] and `main_grad` [N, K], which it changes.
    """
    layers = core("tensor_parallel.layers")
    if not hasattr(layers, NAME):
        functions = {"wgrad_gemm_accum_fp32": add_gradient, "wgrad_gemm_accum_fp16": add_gradient}
        setattr(layers, NAME, types.SimpleNamespace(**functions))
