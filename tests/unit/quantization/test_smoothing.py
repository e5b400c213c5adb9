"""A scale per channel changes no result in high precision, and saves the other channels from an outlier channel."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.quantization.smoothing import channel_scales, smooth
from megafp8.recipes import blockwise, mxfp8, nvfp4, tensorwise
from megafp8.recipes.base import UNQUANTIZED, LinearRecipe

RECIPES = {
    "tensorwise": tensorwise.build("hybrid"),
    "blockwise": blockwise.build("e4m3"),
    "mxfp8": mxfp8.build("e4m3"),
    "nvfp4": nvfp4.build("e2m1"),
}
OUTLIER = 2.0**20


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [2, 32, 160] with channels of different size, w [96, 160], dy [2, 32, 96]."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((2, 32, 160), (96, 160), (2, 32, 96)))
    x = (x * torch.logspace(-0.5, 0.5, 160)).to(dtype)
    return x.requires_grad_(), torch.nn.Parameter(w.to(dtype)), dy.to(dtype)


def run(recipe: LinearRecipe, dtype: torch.dtype, is_smooth: bool, outlier: float = 1.0) -> tuple[Tensor, ...]:
    """y, dx, dw and the fused FP32 dw; channel 7 is `outlier` times as large, and its weight as much smaller."""
    x, w, dy = tensors(dtype)
    with torch.no_grad():
        x[..., 7] *= outlier
        w[:, 7] /= outlier
    w.main_grad = torch.ones(w.shape)
    results: list[Tensor] = []
    for fuses in (False, True):
        noise = RoundingNoise("test") if recipe.is_stochastic else None
        plan = LinearPlan(recipe=recipe, noise=noise, fuse_wgrad=fuses)
        given, plan = smooth(x, plan) if is_smooth else (x, plan)
        y = emulated_linear(given, w, None, plan)
        if fuses:
            y.backward(dy)
        else:
            results += [y.detach(), *torch.autograd.grad(y, (x, w), dy)]
    return (*results, w.main_grad - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_changes_in_high_precision(dtype: torch.dtype) -> None:
    for plain, smoothed in zip(run(UNQUANTIZED, dtype, False), run(UNQUANTIZED, dtype, True), strict=True):
        assert torch.equal(plain, smoothed)


def errors(recipe: LinearRecipe, outlier: float, is_smooth: bool) -> list[float]:
    """Relative errors of y, dx and dw but for the outlier channel."""
    exact = run(UNQUANTIZED, torch.float32, False, outlier)
    found = run(recipe, torch.float32, is_smooth, outlier)
    rest = [index for index in range(160) if index != 7]
    pairs = [(found[0], exact[0]), *((a[..., rest], b[..., rest]) for a, b in zip(found[1:], exact[1:], strict=True))]
    return [float((a - b).norm() / b.norm()) for a, b in pairs]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_an_outlier_channel_costs_nothing(recipe: LinearRecipe) -> None:
    before, after = errors(recipe, 1.0, True), errors(recipe, OUTLIER, True)
    assert after == pytest.approx(before, rel=0.02)
    assert max(after) < (0.3 if recipe is RECIPES["nvfp4"] else 0.1)
    assert errors(recipe, OUTLIER, False)[0] > 1.8 * after[0]  # without scales per channel


def test_scales_are_powers_of_two_below_the_amax() -> None:
    first, second = [0.0, 1.0, -3.0, 2.0**-80, torch.inf, torch.nan, 5e-39], [0.0, 0.5, 4.0, 0.0, 1.0, 1.0, 0.0]
    values = torch.tensor([first, second])
    assert channel_scales(values).tolist() == [1.0, 1.0, 4.0, 2.0**-60, 1.0, 1.0, 2.0**-60]
    halves = torch.tensor([[60000.0, 1e-7]], dtype=torch.float16)
    assert channel_scales(halves).tolist() == [64.0, 1 / 64]


def test_the_gradient_does_not_flow_through_the_scales() -> None:
    x, _, _ = tensors(torch.float32)
    smoothed, plan = smooth(x, LinearPlan(recipe=UNQUANTIZED))
    assert plan.channel_scales is not None and not plan.channel_scales.requires_grad
    (gradient,) = torch.autograd.grad(smoothed.sum(), x)
    assert torch.equal(gradient, (1 / plan.channel_scales).expand_as(gradient))
    assert dataclasses.replace(plan, channel_scales=None) == LinearPlan(recipe=UNQUANTIZED)
