"""Inputs that arrive as codes: codes, scales, counts and gradients, against quantizing the tokens of each expert."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.config.grouped_experts import shares_input_codes
from megafp8.nonfinite.operands import EmulatedCounters
from megafp8.quantization.counters import NON_FINITE
from megafp8.quantization.delayed_scaling import DelayedState
from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.quantization.prequantized import PrequantizedScale, codes_of_experts, dequantized
from megafp8.quantization.quantize import dequantize, quantize
from megafp8.recipes import registry
from megafp8.recipes.base import Gemm, LinearRecipe, Operand

COUNTS = torch.tensor([3, 0, 5, 8])
WIDTH = 32
RECIPE = registry.get("tensorwise").rules("hybrid")
DELAYED = registry.get("delayed").rules("hybrid", {"fp8_amax_history_len": 2})


def rows(seed: int = 0) -> Tensor:
    values = torch.randn(int(COUNTS.sum()), WIDTH, generator=torch.Generator().manual_seed(seed))
    return (values * torch.logspace(-3, 3, len(values))[:, None]).bfloat16()


def arrived(recipe: LinearRecipe, inputs: Tensor, **options: Any) -> tuple[Tensor, PrequantizedScale]:
    """The numbers of the codes of one expert's tokens, and their scale."""
    rule = recipe.rule(Operand.INPUT, Gemm.FPROP)
    assert rule is not None
    codes, scales = codes_of_experts(inputs, torch.tensor([len(inputs)]), rule, **options)
    return codes.to(inputs.dtype).requires_grad_(), PrequantizedScale(scales.amax[0], scales.dequant_scale[0])


@pytest.mark.parametrize("options", [{}, {"fp8_power_2_scale": True}, {"fp8_tensorwise_margin": 1}])
def test_codes_are_those_of_each_expert_alone(options: dict[str, Any]) -> None:
    rule = registry.get("tensorwise").rules("e4m3", options).rule(Operand.INPUT, Gemm.FPROP)
    assert rule is not None
    codes, scales = codes_of_experts(rows(), COUNTS, rule)
    parts = zip(rows().split(COUNTS.tolist()), codes.split(COUNTS.tolist()), scales.dequant_scale, strict=True)
    for tokens, found, dequant_scale in parts:
        expected = quantize(tokens, rule)
        assert torch.equal(found.view(torch.uint8), expected.codes.view(torch.uint8))
        assert torch.equal(dequant_scale, expected.dequant_scale)


def results(inputs: Tensor, weight: Tensor, plan: LinearPlan) -> tuple[Tensor, ...]:
    """Output and gradients of a linear."""
    weight = weight.clone().requires_grad_()
    output = emulated_linear(inputs, weight, None, plan)
    output.backward(torch.ones_like(output))
    assert inputs.grad is not None and weight.grad is not None
    return output.detach(), inputs.grad, weight.grad


def test_a_linear_multiplies_codes_as_it_would_multiply_the_tokens() -> None:
    inputs, weight = rows(1), rows(2)
    numbers, scale = arrived(RECIPE, inputs)
    plan = LinearPlan(recipe=RECIPE)
    expected = results(inputs.clone().requires_grad_(), weight, plan)
    found = results(numbers, weight, dataclasses.replace(plan, prequantized=scale))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_delayed_scaling_records_the_amax_of_the_tokens() -> None:
    inputs, weight = rows(1), rows(2)
    states = [DelayedState(DELAYED).train(), DelayedState(DELAYED).train()]
    for state in states:
        state.quant_scale.fill_(0.25)
    numbers, scale = arrived(DELAYED, inputs, quant_scales=states[1].next_input_scale()[None])
    plans = [LinearPlan(recipe=DELAYED, delayed=state.scales_for_forward()[0]) for state in states]
    expected = results(inputs.clone().requires_grad_(), weight, plans[0])
    found = results(numbers, weight, dataclasses.replace(plans[1], prequantized=scale))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert torch.equal(states[0].amax_history, states[1].amax_history) and states[0].amax_history[0].all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_counted(value: float) -> None:
    inputs = rows(1)
    inputs[2, 3] = value
    numbers, scale = arrived(RECIPE, inputs)
    counters = EmulatedCounters(["fc1"], [], torch.device("cpu"))
    plan = LinearPlan(recipe=RECIPE, prequantized=scale, counts=counters.of_linear("fc1"))
    emulated_linear(numbers, rows(2), None, plan)
    assert counters.of_linear("fc1")[Operand.INPUT, Gemm.FPROP][NON_FINITE] == 1


def test_the_observer_does_not_see_what_arrived() -> None:
    seen = []
    numbers, scale = arrived(RECIPE, rows(1))
    plan = LinearPlan(recipe=RECIPE, prequantized=scale, observer=lambda operand, *_: seen.append(operand))
    results(numbers, rows(2), plan)
    assert seen == [Operand.WEIGHT, Operand.GRAD_OUTPUT]


def test_tokens_for_high_precision_have_their_own_gradient() -> None:
    numbers, scale = arrived(RECIPE, rows(1))
    tokens = dequantized(numbers, scale)
    rule = RECIPE.rule(Operand.INPUT, Gemm.FPROP)
    assert rule is not None
    assert torch.equal(tokens, dequantize(quantize(rows(1), rule)).bfloat16())
    tokens.backward(torch.full_like(tokens, 3.0))
    assert numbers.grad is not None and (numbers.grad == 3).all()


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_codes_of_blocks_cannot_serve_both_gemms(recipe: str) -> None:
    assert not shares_input_codes(registry.get(recipe).rules())
    assert shares_input_codes(RECIPE) and not shares_input_codes(RECIPE.without_wgrad())
