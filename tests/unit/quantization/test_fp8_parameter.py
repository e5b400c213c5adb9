"""Weights stored as codes: quantized by parts as in one piece, and BF16 tensors for other code."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megafp8.quantization.delayed_scaling import DelayedScale, DelayedState
from megafp8.quantization.fp8_parameter import (
    WEIGHT,
    QuantizedParameter,
    WeightCodes,
    quantize_assigned_weights,
    quantize_shards,
)
from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.quantization.quantize import dequantize, quantize
from megafp8.recipes import blockwise, delayed, tensorwise
from megafp8.recipes.base import Gemm, LinearRecipe, Operand, OperandRule

RECIPES = {
    "tensorwise": tensorwise.build("hybrid"),
    "tensorwise e5m2": tensorwise.build("e5m2", fp8_power_2_scale=True),
    "delayed": delayed.build("hybrid"),
    "blockwise": blockwise.build("e4m3"),
    "blockwise fp32": blockwise.build("e4m3", fp8_block_scaling_fp32_scales=True),
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
RAGGED = (200, 144)


def rule_of(recipe: LinearRecipe) -> OperandRule:
    return recipe.rule(Operand.WEIGHT, Gemm.FPROP)


def master_weight(shape: tuple[int, int], seed: int = 0) -> Tensor:
    """FP32 numbers with a few difficult ones."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    weight[0, :4] = torch.tensor([math.nan, 0.0, -0.0, 1e-40])
    weight[130:, :] *= 1e-3
    weight[150, 100] = 37.3  # no BF16 number
    return weight


def parameter_of(weight: Tensor, recipe: LinearRecipe, state: DelayedState | None = None) -> QuantizedParameter:
    """The parameter that replaces a linear's weight, not settled yet."""
    return nn.Parameter(QuantizedParameter(WeightCodes(weight.bfloat16(), rule_of(recipe), delayed=state)))


def settled(weight: Tensor, recipe: LinearRecipe, state: DelayedState | None = None) -> QuantizedParameter:
    linear = nn.Linear(1, 1, bias=False)
    linear.weight = parameter_of(weight, recipe, state)
    quantize_assigned_weights([linear])
    return linear.weight


def state_for(recipe: LinearRecipe, scale: float = 3.7) -> DelayedState | None:
    if recipe.delayed is None:
        return None
    state = DelayedState(recipe)
    state.quant_scale[WEIGHT] = scale
    return state


def fully_quantized(weight: Tensor, recipe: LinearRecipe) -> Any:
    """The BF16 weight quantized in one piece, with `state_for`'s scale."""
    scale = DelayedScale(torch.tensor(3.7), None) if recipe.delayed else None
    return quantize(weight.bfloat16(), rule_of(recipe), delayed=scale)


def check_equal(found: Any, expected: Any) -> None:
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.dequant_scale, expected.dequant_scale)


# --- by parts ---------------------------------------------------------------------------------------------------------


@each_recipe
@pytest.mark.parametrize("cuts", [(), (144 * 128,), (1, 20_000), (144 * 130 + 7, 144 * 130 + 9, 28_000)])
def test_quantization_by_parts_equals_that_of_the_full_weight(recipe: LinearRecipe, cuts: tuple[int, ...]) -> None:
    """Split at a block's edge, within rows, within a row, and with a rank that has nothing."""
    masters = [master_weight(RAGGED, seed) for seed in range(2)]
    ends = [0, *cuts, masters[0].numel()]
    pieces: list[tuple[list[Tensor | None], list[int | None]]] = [
        ([master.flatten()[start:end] for master in masters], [start, start])
        for start, end in zip(ends[:-1], ends[1:], strict=True)
    ]
    pieces.append(([None, None], [None, None]))
    ranks = [([parameter_of(master, recipe, state_for(recipe)) for master in masters], *piece) for piece in pieces]
    amaxes: list[Tensor] = []
    for weights, parts, starts in ranks:
        weights[0].codes.exchange = lambda mine, group: amaxes.append(mine.clone())
        quantize_shards(weights, parts, starts, None)
    largest = torch.stack(amaxes).amax(dim=0)
    for weights, parts, starts in ranks:
        weights[0].codes.exchange = lambda mine, group: mine.copy_(largest)
        quantize_shards(weights, parts, starts, None)
    for index, master in enumerate(masters):
        expected, gathered = fully_quantized(master, recipe), torch.zeros(master.numel(), dtype=torch.uint8)
        for (weights, _, _), start, end in zip(ranks, ends[:-1], ends[1:], strict=False):
            gathered[start:end] = weights[index].codes.raw.flatten()[start:end]
        assert torch.equal(gathered.view(RAGGED), expected.codes.view(torch.uint8))
        for weights, _, _ in ranks:
            assert torch.equal(weights[index].codes.dequant_scale, expected.dequant_scale)


@each_recipe
def test_setting_a_weight_quantizes_it_like_bf16(recipe: LinearRecipe) -> None:
    weight = settled(master_weight(RAGGED), recipe, state_for(recipe))
    check_equal(weight.codes.quantized(), fully_quantized(master_weight(RAGGED), recipe))
    weight.data.copy_(master_weight(RAGGED, seed=1))
    with pytest.raises(AssertionError, match="quantize_assigned_weights"):
        weight.codes.quantized()
    assert torch.equal(weight.clone().nan_to_num(), master_weight(RAGGED, seed=1).bfloat16().nan_to_num())


@each_recipe
def test_an_update_leaves_codes_and_scales_at_their_addresses(recipe: LinearRecipe) -> None:
    """A CUDA graph reads them there."""
    state = state_for(recipe)
    weight, master = settled(torch.randn(RAGGED), recipe, state), 3 * torch.randn(RAGGED)
    codes, before = weight.codes.quantized(), weight.codes.amax
    quantize_shards([weight], [master.flatten()], [0], None)
    check_equal(codes, fully_quantized(master, recipe))
    assert weight.codes.amax is before and before.max() == master.bfloat16().abs().max()


@pytest.mark.parametrize("value", [0.0, 1e-38, 3e38, math.inf, math.nan])
@each_recipe
def test_weights_of_one_number(recipe: LinearRecipe, value: float) -> None:
    master = torch.full((3, 5), value)
    check_equal(settled(master, recipe, state_for(recipe)).codes.quantized(), fully_quantized(master, recipe))


@pytest.mark.gpu
@each_recipe
def test_a_gpu_computes_the_same_codes(recipe: LinearRecipe) -> None:
    state = state_for(recipe)
    found = settled(master_weight(RAGGED).cuda(), recipe, state if state is None else state.cuda()).codes
    expected = settled(master_weight(RAGGED), recipe, state_for(recipe)).codes
    assert torch.equal(found.raw.cpu(), expected.raw)
    assert torch.equal(found.dequant_scale.cpu(), expected.dequant_scale)


# --- as a tensor
# -------------------------------------------------------------------------------------------------------


def test_fp8_parameter_acts_as_a_bf16_parameter() -> None:
    weight = settled(master_weight(RAGGED), RECIPES["blockwise"])
    assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf
    assert (weight.shape, weight.dtype, weight.type()) == (RAGGED, torch.bfloat16, "torch.BFloat16Tensor")
    values = dequantize(weight.codes.quantized(), torch.bfloat16)
    positive, negative = nn.functional.relu(weight), nn.functional.relu(-weight)
    for read in (weight.detach().clone(), weight.dequantize(), positive - negative):
        assert type(read) is Tensor
        assert torch.equal(read.nan_to_num(), values.nan_to_num())
    assert type(torch.empty_like(weight, requires_grad=False)) is Tensor
    nn.functional.linear(torch.ones(1, RAGGED[1], dtype=torch.bfloat16), weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones(RAGGED, dtype=torch.bfloat16))


def test_views_share_the_weight() -> None:
    weight = settled(master_weight(RAGGED), RECIPES["tensorwise"])
    other, plain = weight.data, torch.zeros(RAGGED)
    weight.codes.raw.zero_()
    assert not other.float().any()
    plain.copy_(weight.detach())
    assert not plain.any()


def test_codes_in_an_external_buffer() -> None:
    """A gather of another weight into the buffer, before this one's backward pass, does not change this one."""
    weight, buffer = settled(torch.randn(64, 32), RECIPES["tensorwise"]), torch.zeros(2, 64, 32, dtype=torch.uint8)
    before = weight.codes.raw
    weight.codes.move_to(buffer[0])
    assert torch.equal(buffer[0], before)
    x = torch.randn(16, 32).bfloat16().requires_grad_()
    output = emulated_linear(x, weight, None, LinearPlan(recipe=RECIPES["tensorwise"]))
    buffer[1].fill_(1)
    output.sum().backward()
    assert x.grad.any()
    buffer[0].fill_(1)
    assert torch.equal(weight.codes.raw, buffer[0])


def test_only_assignment_writes_to_the_weight() -> None:
    weight = settled(master_weight(RAGGED), RECIPES["tensorwise"])
    for write in (lambda: weight.data.mul_(2), lambda: weight.data.zero_(), lambda: torch.nn.init.normal_(weight)):
        with pytest.raises(TypeError, match="copy_"):
            write()


# --- in a linear ------------------------------------------------------------------------------------------------------


@each_recipe
def test_a_linear_gives_equal_results_with_fp8_parameters(recipe: LinearRecipe) -> None:
    weight = torch.randn(64, 32).bfloat16()
    x = torch.randn(16, 32).bfloat16()
    results = []
    for makes_codes in (False, True):
        state = state_for(recipe)
        plan = LinearPlan(recipe=recipe)
        if state is not None:
            plan = dataclasses.replace(plan, delayed=state.scales(records_amax=True))
        used = settled(weight, recipe, state) if makes_codes else nn.Parameter(weight.clone())
        given = x.clone().requires_grad_()
        output = emulated_linear(given, used, None, plan)
        output.backward(torch.ones_like(output))
        history = None if state is None else state.amax_history.tolist()
        results.append((output.tolist(), given.grad.tolist(), used.grad.tolist(), history))
    assert results[0] == results[1]
