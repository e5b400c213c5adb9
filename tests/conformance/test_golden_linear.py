"""A linear's outputs and gradients equal those of Transformer Engine on an H200.

Within the bits that its tensor cores drop, since ours are summed in FP32; and bitwise by a model of these units.
"""

import pytest
import torch
from golden import everything, needs_all, selected, tensor
from tensor_core import hopper_gemm
from tolerances import LINEAR_EQUAL_FRACTION, LINEAR_ROUNDING, TENSOR_CORE_PEAK

from megafp8.quantization.delayed_scaling import AmaxExchange, DelayedState
from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.recipes import blockwise, delayed, tensorwise
from megafp8.recipes.base import OPERANDS_OF, Gemm, Operand

RECIPES = {
    "tensorwise": tensorwise.build("hybrid"),
    "tensorwise-e4m3": tensorwise.build("e4m3"),
    "blockwise": blockwise.build("e4m3"),
    "blockwise-hybrid": blockwise.build("hybrid"),
}

# Transformer Engine's defaults, with which its linear was run.
DELAYED = delayed.build("hybrid", fp8_amax_history_len=1024, fp8_amax_compute_algo="max")


def run_gemm(gemm: str, plan: LinearPlan, part: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """One GEMM of the emulated linear alone, and the sum of |a| |b| of its operands."""
    if gemm == "fprop":
        x, w, bias = part["x"], part["w"], part["b"]
        return emulated_linear(x, w, bias, plan), x.abs().double() @ w.abs().double().t() + bias.abs().double()
    dy = part["dy"]
    x = part.get("x", dy.new_zeros(dy.shape[0], part["w"].shape[1] if gemm == "dgrad" else 1)).requires_grad_()
    w = part.get("w", dy.new_zeros(dy.shape[1], x.shape[1])).requires_grad_()
    emulated_linear(x, w, None, plan).backward(dy)
    a, b = (dy, w) if gemm == "dgrad" else (dy.t(), x)
    return (x if gemm == "dgrad" else w).grad, a.detach().abs().double() @ b.detach().abs().double()


def modelled(gemm: str, plan: LinearPlan, part: dict[str, torch.Tensor]) -> torch.Tensor:
    """The result of a model of Hopper's tensor cores for our operands."""
    quantized = [plan.quantize(part[NAMES[each]], each, Gemm(gemm)) for each in dict(OPERANDS_OF)[Gemm(gemm)]]
    return hopper_gemm(Gemm(gemm), *quantized, part["b"] if gemm == "fprop" else None).bfloat16()


def check_gemm(gemm: str, plan: LinearPlan, part: dict[str, torch.Tensor], theirs: torch.Tensor) -> float:
    """One GEMM: TE's result equals the model, ours is within the bound. Returns our fraction of equal results."""
    assert torch.equal(modelled(gemm, plan, part), theirs)
    ours, magnitude = run_gemm(gemm, plan, part)
    difference = (ours.detach().double() - theirs.double()).abs()
    dropped = TENSOR_CORE_PEAK[plan.recipe.name][gemm] * magnitude
    bound = LINEAR_ROUNDING * theirs.double().abs() + dropped
    assert (difference <= bound).all(), f"{gemm}: {(difference / bound).max().item():.2f} times the bound"
    return (ours == theirs).double().mean().item()


RESULT_OF = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}
NAMES = {Operand.INPUT: "x", Operand.WEIGHT: "w", Operand.GRAD_OUTPUT: "dy"}
OPERANDS = {"fprop": ("x", "w", "b"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


def parts(arrays: dict, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors under a prefix."""
    return {key.removeprefix(prefix): tensor(raw) for key, raw in arrays.items() if key.startswith(prefix)}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gemm", RESULT_OF)
def test_selected_linears(gemm: str, recipe: str) -> None:
    part = parts(selected(), f"linear/{recipe}/step0/{gemm}/")
    check_gemm(gemm, LinearPlan(recipe=RECIPES[recipe]), part, part.pop(RESULT_OF[gemm]))


@needs_all
@pytest.mark.parametrize("recipe", RECIPES)
def test_all_linears(recipe: str) -> None:
    part = parts(everything("_linear"), f"linear/{recipe}/step0/")
    for gemm, operands in OPERANDS.items():
        chosen = {name: part[name].clone() for name in operands}
        equal = check_gemm(gemm, LinearPlan(recipe=RECIPES[recipe]), chosen, part[RESULT_OF[gemm]])
        assert equal > LINEAR_EQUAL_FRACTION
    x, w, b = (part[name].clone().requires_grad_() for name in ("x", "w", "b"))
    emulated_linear(x, w, b, LinearPlan(recipe=RECIPES[recipe])).backward(part["dy"])
    assert torch.equal(b.grad, part["db"])


def check_delayed_steps(gemm: str, arrays: dict, prefix: str) -> list[float]:
    """Three steps of one GEMM with the scales of the previous steps; returns the fractions of equal results."""
    state, exchange = DelayedState(DELAYED), AmaxExchange()
    exchange.join(state, None)
    equal = []
    for step in range(3):
        part = parts(arrays, prefix.format(step=step))
        theirs = part[RESULT_OF[gemm]]
        scales, _ = state.scales_for_forward()
        plan = LinearPlan(recipe=DELAYED, delayed=scales)
        equal.append(check_gemm(gemm, plan, {name: part[name] for name in OPERANDS[gemm]}, theirs))
        exchange.forward_ran(state)
        exchange.backward_ran(state)
    return equal


@pytest.mark.parametrize("gemm", ["fprop", "dgrad"])
def test_selected_delayed_steps(gemm: str) -> None:
    check_delayed_steps(gemm, selected(), f"linear/delayed/step{{step}}/{gemm}/")


@needs_all
@pytest.mark.parametrize("gemm", RESULT_OF)
def test_all_delayed_steps(gemm: str) -> None:
    assert min(check_delayed_steps(gemm, everything("_linear"), "linear/delayed/step{step}/")) > LINEAR_EQUAL_FRACTION
