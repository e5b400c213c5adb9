"""Linears observed by hooks: their inputs, and that the hooks leave nothing behind."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan, Observer
from megafp8.quantization.quantized_tensor import Quantized
from megafp8.recipes import mxfp8, tensorwise
from megafp8.recipes.base import Gemm, LinearRecipe, Operand
from megafp8.training.extensions.statistics_hooks import HookedLinear, linear_input


def slow_norm(row: list[float], gamma: list[float], beta: list[float], is_rms: bool, eps: float) -> list[float]:
    mean = 0.0 if is_rms else sum(row) / len(row)
    variance = sum((x - mean) ** 2 for x in row) / len(row)
    return [(x - mean) / (variance + eps) ** 0.5 * g + b for x, g, b in zip(row, gamma, beta, strict=True)]


@pytest.mark.parametrize("is_zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_hook_of_a_linear_with_a_norm_observes_the_norms_output(kind: str, is_zero_centered: bool) -> None:
    gamma, beta = torch.tensor([0.5, 2.0, 1.0]), torch.tensor([0.1, 0.0, -0.2])
    has_bias = kind == "LayerNorm"
    module = SimpleNamespace(
        normalization=kind, eps=1e-3, zero_centered_gamma=is_zero_centered,
        layer_norm_weight=gamma - 1 if is_zero_centered else gamma, layer_norm_bias=beta if has_bias else None,
    )  # fmt: skip
    values = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.0, 0.25]])
    betas = beta.tolist() if has_bias else [0.0] * 3
    expected = [slow_norm(row, gamma.tolist(), betas, not has_bias, 1e-3) for row in values.tolist()]
    torch.testing.assert_close(linear_input(module, values), torch.tensor(expected))


def test_hook_of_a_linear_without_a_norm_observes_its_input() -> None:
    values = torch.randn(2, 3)
    assert linear_input(nn.Linear(3, 3), values) is values


class Linear(nn.Module):
    """A linear with an output and a bias that is added elsewhere, like megatron-core's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16())

    def forward(self, values: Tensor) -> tuple[Tensor, None]:
        return values @ self.weight.t(), None


@pytest.mark.parametrize("recipe", [tensorwise.build("hybrid"), mxfp8.build("e4m3")])
def test_hooks_observe_the_operands_of_an_emulated_linear(recipe: LinearRecipe) -> None:
    module = Linear()
    shown: dict[str, dict[tuple[Operand, Gemm], Quantized]] = {"outside": {}, "inside": {}}

    def enter(side: str) -> Observer:
        def observer(operand: Operand, tensor: Tensor, quantized: Mapping[Gemm, Quantized]) -> None:
            shown[side].update({(operand, gemm): each for gemm, each in quantized.items()})

        return observer

    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    gradient = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    watched = HookedLinear("layers.0.linear_fc1", module, recipe)
    watched.attach(enter("outside"))
    output, _ = module(values)
    output.backward(gradient)
    plan = LinearPlan(recipe=recipe, observer=enter("inside"))
    emulated_linear(values, module.weight, None, plan).backward(gradient)
    assert set(shown["outside"]) == set(shown["inside"]) and len(shown["inside"]) == 6
    for use, inside in shown["inside"].items():
        outside = shown["outside"][use]
        assert torch.equal(outside.codes.view(torch.uint8), inside.codes.view(torch.uint8)), use
        assert torch.equal(outside.dequant_scale.float(), inside.dequant_scale.float()), use

    late, _ = module(values)
    watched.detach()
    seen = dict(shown["outside"])
    shown["outside"].clear()
    late.backward(gradient)
    module(values)[0].backward(gradient)
    assert seen and not shown["outside"] and not module._forward_pre_hooks and not module._forward_hooks


def test_codes_are_computed_once_and_every_gradient_is_observed() -> None:
    """Nothing of the second microbatch is quantized. Its gradient marks the end of the first one's backward pass."""
    module, calls = Linear(), []
    watched = HookedLinear("layers.0.linear_fc1", module, tensorwise.build("hybrid"))
    watched.attach(lambda operand, tensor, quantized: calls.append((operand, bool(quantized))))
    values = torch.ones(64, 64).bfloat16().requires_grad_()
    for _ in range(3):
        module(values)[0].sum().backward()
    first = [(Operand.INPUT, True), (Operand.WEIGHT, True), (Operand.GRAD_OUTPUT, True)]
    assert calls == first + 2 * [(Operand.GRAD_OUTPUT, False)]
    watched.detach()
    watched.attach(lambda operand, tensor, quantized: calls.append((operand, bool(quantized))))
    calls.clear()
    module(values)[0].sum().backward()
    assert calls == first, "the next statistics step observes all again"
