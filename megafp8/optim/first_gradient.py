"""The first weight gradient of a step overwrites the buffer, so that nothing is zeroed and then read for it.

A linear that adds its gradient to the buffer inside its GEMM can as well replace what is there. It looks at the weight
for that: `overwrite_main_grad` is set before the step, and taken back once the first microbatch's gradient is in.
Gradients that autograd makes are added by megatron-core, and their parts of the buffer are zeroed as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class FirstGradient:
    """Begins the gradients of a step in place of megatron-core's `zero_grad_buffer`.

    Forward and backward passes must alternate, as they do without pipeline stages: some layers look at the weight in
    the forward pass.

    Args:
        chunks: the model, wrapped with its gradient buffers.
        weights: those whose linears heed `overwrite_main_grad`.
    """

    def __init__(self, chunks: Sequence[Any], weights: Sequence[nn.Parameter]):
        self.chunks, self.weights = chunks, weights
        overwritten = set(weights)
        parameters = [parameter for chunk in chunks for parameter in chunk.params_with_grad]
        self.zeroed = [parameter.main_grad for parameter in parameters if parameter not in overwritten]
        for weight in weights:
            weight.register_post_accumulate_grad_hook(has_gradient)
        for chunk in chunks:
            for buffer in chunk.buffers:
                buffer.reset = do_nothing

    @torch.no_grad()
    def start(self) -> None:
        """Before the first microbatch of a step."""
        for weight in self.weights:
            mark(weight, True)
        torch._foreach_zero_(self.zeroed)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()


def has_gradient(weight: torch.Tensor) -> None:
    """From now on gradients are added."""
    mark(weight, False)


def mark(weight: Any, is_overwritten: bool) -> None:
    """Tell the linear, be it given the weight (Transformer Engine's) or the buffer alone (megatron-core's)."""
    weight.overwrite_main_grad = weight.main_grad.is_overwritten = is_overwritten


def do_nothing() -> None:
    """In place of zeroing a whole buffer."""
