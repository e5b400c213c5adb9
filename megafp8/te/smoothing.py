"""A scale per channel of the input of Transformer Engine's linears (`--fp8-guard smooth-swiglu`).

The scales are those of `quantization/smoothing.py`. The input is divided and the weight multiplied by them before
Transformer Engine quantizes both, so that its casts and GEMMs do not change. The weight is then another tensor in each
microbatch: its codes are not kept for the next one, and its gradient, which is that of the parameter divided by the
scales, comes from autograd in the dtype of the weight. The wgrad GEMM of such a linear adds to no gradient buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Optional

from torch import Tensor, nn

from megafp8.quantization.smoothing import channel_scales
from megafp8.te.high_precision_fallback import separate_linears


def smooth_inputs(chunks: Sequence[nn.Module], names: Collection[str]) -> None:
    """Give the inputs of linears a scale per channel from now on; doing it again changes nothing.

    Args:
        chunks: the model of this rank.
        names: for example `layers.3.linear_fc2`; others than those of this rank are left out.
    """
    for linear in separate_linears(chunks, names):
        if not isinstance(linear._get_weight_and_bias_tensors, SmoothedWeight):
            smooth_input(linear)


def smooth_input(linear: Any) -> None:
    """Give the input of Transformer Engine's `Linear`, or a subclass, a scale per channel from now on."""
    linear._get_weight_and_bias_tensors = smoothed = SmoothedWeight(linear._get_weight_and_bias_tensors)
    linear.register_forward_pre_hook(lambda _, inputs: (smoothed.divide(inputs[0]), *inputs[1:]))
    linear.fuse_wgrad_accumulation = False
    linear.disable_parameter_transpose_cache = True  # megatron-core's name for: quantize in each microbatch
    linear._fp8_workspaces.clear()


class SmoothedWeight:
    """The weight of a linear times the channel scales of its present input.

    Args:
        weight_and_bias: of the linear.
    """

    def __init__(self, weight_and_bias: Any):
        self._weight_and_bias = weight_and_bias
        self._scales: Optional[Tensor] = None

    def divide(self, input: Tensor) -> Tensor:
        """The input [..., K] divided by the scales of its channels, which are kept for the weight."""
        self._scales = channel_scales(input).to(input.dtype)
        return input / self._scales

    def __call__(self) -> tuple[Tensor, Optional[Tensor]]:
        """The weight [N, K] for the input of `divide`, and the bias."""
        weight, bias = self._weight_and_bias()
        assert self._scales is not None
        return weight * self._scales.to(weight.dtype), bias
