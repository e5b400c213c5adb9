"""Delayed scaling computed by hand. tests/conformance compares it with Transformer Engine's updates."""

import pytest
import torch
from torch import Tensor

from megafp8.quantization.delayed_scaling import AmaxExchange, DelayedState, update_scales
from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.quantization.quantize import quantize
from megafp8.recipes import delayed
from megafp8.recipes.base import DelayedOptions, Operand

OPTIONS = DelayedOptions(history_len=3, algorithm="max")
RECIPE = delayed.build("hybrid", fp8_amax_history_len=3, fp8_amax_compute_algo="max")


def updated(amaxes: list[float], options: DelayedOptions) -> tuple[list[float], float]:
    """History and scale of one tensor after some updates."""
    history, scale = torch.zeros(options.history_len, 1), torch.ones(1)
    for amax in amaxes:
        update_scales(history, scale, torch.tensor([amax]), torch.tensor([448.0]), options)
    return history[:, 0].tolist(), scale.item()


@pytest.mark.parametrize(
    "amaxes, history, scale",
    [
        ([], [0, 0, 0], 1.0),
        ([7.0], [0, 0, 7], 64.0),
        ([7.0, 3.5], [0, 7, 3.5], 64.0),
        ([7.0, 3.5, 1.75], [0, 3.5, 1.75], 64.0),
        ([7.0, 3.5, 1.75, 1.75], [0, 1.75, 1.75], 128.0),
        ([7.0, 0.0, 0.0], [0, 0, 7], 64.0),
        ([7.0, torch.nan, 3.5], [0, 7, 3.5], 64.0),
        ([7.0, torch.inf], [0, 7, torch.inf], 64.0),
        ([7.0, torch.inf, 1.75, 1.75], [0, 1.75, 1.75], 64.0),
        ([7.0, torch.inf, 1.75, 1.75, 1.75], [0, 1.75, 1.75], 256.0),
        ([1e-40], [0, 0, 1e-40], torch.finfo(torch.float32).max),
    ],
)
def test_largest_of_the_history(amaxes: list[float], history: list[float], scale: float) -> None:
    """The oldest entry takes part in one more update than the history shows, and zero does not roll."""
    found = updated(amaxes, OPTIONS)
    assert found == (pytest.approx(history, rel=1e-5), scale)


@pytest.mark.parametrize(
    "amaxes, scale", [([7, 3.5], 128.0), ([7, torch.inf], 64.0), ([7, torch.inf, 1.75], 256.0), ([7, 0], 64.0)]
)
def test_most_recent(amaxes: list[float], scale: float) -> None:
    assert updated(amaxes, DelayedOptions(history_len=3))[1] == scale
    assert updated(amaxes, DelayedOptions(history_len=1)) == ([0], scale)


def test_a_recorded_nan_is_dropped() -> None:
    """Otherwise the largest since the last update would stay NaN."""
    state, exchange = DelayedState(RECIPE), AmaxExchange()
    exchange.join(state, None)
    for amax, scale in ((7.0, 64.0), (torch.nan, 64.0), (14.0, 32.0)):
        state.scales(records_amax=True).input.record(torch.tensor(amax))
        exchange.forward_ran(state)
        assert (state.amax_history[0, 0], state.quant_scale[0]) == (0, scale)


def test_margin_is_headroom() -> None:
    assert updated([7.0], DelayedOptions(margin=3))[1] == 8.0


def test_cast_uses_the_previous_scale_and_records_the_amax() -> None:
    state = DelayedState(RECIPE)
    state.quant_scale[0] = 2.0
    x = torch.tensor([3.0, -300.0, float("nan")])
    quantized = quantize(x, RECIPE.rules[0][2], delayed=state.scales(records_amax=True).input)
    assert quantized.codes.float()[:2].tolist() == [6.0, -448.0]
    assert quantized.dequant_scale == 0.5
    assert state.amax_history[0].tolist() == [300.0, 0.0, 0.0]
    quantize(x[:1], RECIPE.rules[0][2], delayed=state.scales(records_amax=True).input)
    assert state.amax_history[0, 0] == 300.0, "the largest since the last update"


def test_state_stays_fp32_in_a_bf16_model() -> None:
    state = torch.nn.Sequential(DelayedState(RECIPE))
    state[0].quant_scale.fill_(1 / 3)
    state.bfloat16()
    assert state[0].quant_scale.dtype == state[0].amax_history.dtype == torch.float32
    assert (state[0].quant_scale == torch.tensor(1 / 3)).all()
    assert list(state.state_dict()) == ["0.amax_history", "0.quant_scale"]


def run_forward(state: DelayedState, exchange: AmaxExchange, x: Tensor, w: Tensor) -> Tensor:
    """As a layer does."""
    scales, is_first_run = state.scales_for_forward()
    plan = LinearPlan(recipe=RECIPE, delayed=scales, after_backward=lambda: exchange.backward_ran(state))
    y = emulated_linear(x, w, None, plan)
    if is_first_run:
        exchange.forward_ran(state)
    return y


def lone_linear() -> tuple[DelayedState, AmaxExchange, Tensor, Tensor]:
    state, exchange = DelayedState(RECIPE), AmaxExchange()
    exchange.join(state, None)
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(16, 16, generator=generator) for _ in range(2))
    return state, exchange, x, w.requires_grad_()


def test_inputs_and_weights_are_updated_after_forward_grad_outputs_after_backward() -> None:
    state, exchange, x, w = lone_linear()
    y = run_forward(state, exchange, x, w)
    expected = torch.stack([448 / x.abs().max(), 448 / w.detach().abs().max(), torch.tensor(1.0)])
    assert torch.equal(state.quant_scale, expected)
    y.backward(torch.full_like(y, 7.0))
    expected[2] = 57344 / 7
    assert torch.equal(state.quant_scale, expected)


def test_linears_are_updated_when_the_last_has_run() -> None:
    states, exchange = [DelayedState(RECIPE) for _ in range(3)], AmaxExchange()
    for state in states:
        exchange.join(state, None)
        state.amax_history[0] = torch.tensor([7.0, 14.0, 28.0])
    exchange.forward_ran(states[1])
    exchange.forward_ran(states[0])
    assert all((state.quant_scale == 1).all() for state in states)
    exchange.forward_ran(states[2])
    for state in states:
        assert state.quant_scale.tolist() == [64.0, 32.0, 1.0]
        assert state.amax_history.tolist() == [[0, 0, 28.0], [0, 0, 0], [7.0, 14.0, 0]]
    with pytest.raises(AssertionError, match="twice"):
        exchange.backward_ran(states[0])
        exchange.backward_ran(states[0])
    exchange.start_step()
    exchange.backward_ran(states[0])


def test_second_run_of_a_recomputed_forward_pass() -> None:
    """It uses the scales of the first run, has no side effects, and does not count as a pass."""
    state, exchange, x, w = lone_linear()
    outputs = []
    for factor in (1.0, 4.0, 0.5):  # microbatches
        with torch.no_grad():
            outputs.append(run_forward(state, exchange, factor * x, w))
    before = state.amax_history.clone(), state.quant_scale.clone()
    for factor, first in zip((1.0, 4.0, 0.5), outputs, strict=True):
        assert torch.equal(run_forward(state, exchange, factor * x, w), first)
    assert torch.equal(state.amax_history, before[0])
    assert torch.equal(state.quant_scale, before[1])


def test_validation_does_not_change_quantizer_state() -> None:
    state, exchange, x, w = lone_linear()
    state.eval()
    run_forward(state, exchange, x, w)
    with torch.no_grad():
        run_forward(state, exchange, x, w)
    assert not state.amax_history.any()
    assert not state.stored_scales


def test_formats_are_those_of_the_operands() -> None:
    assert dict(zip(Operand, DelayedState(RECIPE).format_max, strict=True)) == {
        Operand.INPUT: 448.0, Operand.WEIGHT: 448.0, Operand.GRAD_OUTPUT: 57344.0,
    }  # fmt: skip


def test_stacked_linears_have_the_scales_of_single_ones() -> None:
    """An infinite amax and one of zero leave the scale of their linear alone."""
    stacked, singles = DelayedState(RECIPE, 3), [DelayedState(RECIPE) for _ in range(3)]
    exchange, exchanges = AmaxExchange(), [AmaxExchange() for _ in singles]
    exchange.join(stacked, None)
    for each, single in zip(exchanges, singles, strict=True):
        each.join(single, None)
    amaxes = torch.tensor([[2.0, 3.0, 0.0], [5.0, torch.inf, 7.0]])
    for microbatch in amaxes:
        scales = stacked.scales(records_amax=True)
        for operand in scales:
            operand.record(microbatch)
        exchange.forward_ran(stacked)
        exchange.backward_ran(stacked)
        for amax, single, each in zip(microbatch, singles, exchanges, strict=True):
            for operand in single.scales(records_amax=True):
                operand.record(amax)
            each.forward_ran(single)
            each.backward_ran(single)
    assert torch.equal(stacked.amax_history, torch.stack([single.amax_history for single in singles], dim=-1))
    assert torch.equal(stacked.quant_scale, torch.stack([single.quant_scale for single in singles], dim=-1))
    loaded = DelayedState(RECIPE, 3)
    loaded.load_state_dict(stacked.linear_states())
    assert torch.equal(loaded.amax_history, stacked.amax_history)
    assert torch.equal(loaded.quant_scale, stacked.quant_scale)
