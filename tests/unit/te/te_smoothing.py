"""A program of `test_te_without_cuda.py`: scales per channel for the input of Transformer Engine's linears, on
linears that take weight and input from the same places and compute in FP32."""

from types import SimpleNamespace
from typing import Any, Optional

import te_without_cuda  # noqa: F401  (first)
import torch
from torch import Tensor

from megafp8.quantization.smoothing import channel_scales
from megafp8.te import high_precision_fallback, smoothing


class Linear(torch.nn.Linear):
    """Notes what it multiplies."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.fuse_wgrad_accumulation, self.disable_parameter_transpose_cache = True, False
        self._fp8_workspaces: dict[str, Any] = {"weight": "codes"}

    def _get_weight_and_bias_tensors(self) -> tuple[Tensor, Optional[Tensor]]:
        return self.weight, self.bias

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self._get_weight_and_bias_tensors()
        self.multiplied = input.detach(), weight.detach()
        return torch.nn.functional.linear(input, weight, bias)


def results(linear: Linear, input: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients."""
    input = input.clone().requires_grad_()
    output = linear(input)
    return output, *torch.autograd.grad(output.square().sum(), [input, linear.weight, linear.bias])


torch.manual_seed(0)
linear, other = Linear(), Linear()
high_precision_fallback.named_linears = lambda chunk: [("layers.0.linear_fc2", linear), ("layers.1.linear_fc2", other)]
split: list[Any] = []
mlp = SimpleNamespace(name="mlp")
high_precision_fallback.fused_mlps = lambda chunk: {linear: mlp}
high_precision_fallback.split = lambda each: split.append(each) if each not in split else None  # twice is once

inputs = [torch.randn(8, 6) * torch.tensor([1.0, 1.0, 1000.0, 1.0, 0.0, 1e-3]) for _ in range(2)]
expected = [results(linear, input) for input in inputs]
for _ in range(2):  # the second time changes nothing
    smoothing.smooth_inputs([torch.nn.Module()], ["layers.0.linear_fc2", "layers.7.linear_fc2"])
assert split == [mlp]
assert not linear.fuse_wgrad_accumulation and linear.disable_parameter_transpose_cache and not linear._fp8_workspaces
assert other.fuse_wgrad_accumulation and other._fp8_workspaces

for input, before in zip(inputs, expected, strict=True):
    after = results(linear, input)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), "powers of two change no bit"
    scales = channel_scales(input)
    assert torch.equal(linear.multiplied[0], input / scales)
    assert torch.equal(linear.multiplied[1], linear.weight.detach() * scales)
    largest = linear.multiplied[0].abs().amax(0)
    assert (((largest >= 1) & (largest < 2)) | (largest == 0)).all()
