"""FP8 by a tensor's own amax in two launches, against torch operations: every code and the scale.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Optional

import interpreter
import pytest
import torch
from interpreter import DEVICE, IS_INTERPRETED
from swiglu_reference import swiglu_with_gradient
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.kernels import tensorwise
from megafp8.kernels.annotations import annotate, annotation
from megafp8.kernels.rounding import format_spec
from megafp8.kernels.tensorwise import TensorwiseOutput
from megafp8.quantization.rounding import cast
from megafp8.quantization.scaling import compute_amax, quant_scale_of
from megafp8.recipes.base import ScaleRule
from megafp8.recipes.formats import E4M3, E5M2, Format

pytestmark = pytest.mark.usefixtures("exact")

TOKENS, WIDTH = 128, 256
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
KINDS = {
    "many sizes": lambda x: x * torch.logspace(-5, 4, x.shape[1]),
    "one size": lambda x: x,
    "zeros": torch.zeros_like,
    "NaN": lambda x: x.index_fill(0, torch.tensor(7), torch.nan),
    "infinity": lambda x: x.index_fill(0, torch.tensor(100), -torch.inf),
    "scales overflow": lambda x: x * 1e-37,
}


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few enough that each has several tiles."""
    monkeypatch.setattr(tensorwise, "PROGRAMS", 4)
    monkeypatch.setattr(tensorwise, "GRADIENTS_PROGRAMS", 4)


def drawn(tokens: int, width: int, seed: int = 0, kind: str = "many sizes") -> Tensor:
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))
    return KINDS[kind](x).bfloat16().to(DEVICE)


def empty_codes(tokens: int, width: int, fmt: Format, is_power_of_two: bool = False) -> TensorwiseOutput:
    return TensorwiseOutput(
        rows=torch.zeros(tokens, width, dtype=torch.uint8, device=DEVICE),
        columns=torch.zeros(width, tokens, dtype=torch.uint8, device=DEVICE),
        scale_inv=torch.zeros(1, device=DEVICE),
        spec=format_spec(fmt),
        is_power_of_two=is_power_of_two,
    )


def check_codes(codes: TensorwiseOutput, values: Tensor, fmt: Format, rounded: Optional[Tensor] = None) -> None:
    """The scale is that of `values`, the codes are theirs or those of their rounded values."""
    rule = ScaleRule.POWER_OF_TWO if codes.is_power_of_two else ScaleRule.FP32
    quant_scale = quant_scale_of(compute_amax(values), fmt, rule)
    written = values if rounded is None else rounded
    assert torch.equal(codes.scale_inv, (1 / quant_scale).reshape(1))
    assert torch.equal(codes.rows, cast(written.float() * quant_scale, fmt).view(torch.uint8))
    assert torch.equal(codes.columns, codes.rows.t())


@FORMATS
@pytest.mark.parametrize("is_power_of_two", [True, False], ids=["pow2", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_cast(kind: str, fmt: Format, is_power_of_two: bool) -> None:
    inputs, codes = drawn(TOKENS, WIDTH, kind=kind), empty_codes(TOKENS, WIDTH, fmt, is_power_of_two)
    tensorwise.cast(inputs, codes)
    check_codes(codes, inputs, fmt)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 3e38])
def test_casts_flag_an_infinite_amax(value: float) -> None:
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    inputs, gradients = torch.ones(TOKENS, 2 * WIDTH, device=DEVICE), torch.ones(TOKENS, WIDTH, device=DEVICE)
    result, of_inputs = (
        dataclasses.replace(empty_codes(TOKENS, width, E4M3), infinity=flag) for width in (WIDTH, 2 * WIDTH)
    )
    calls: list[tuple[Callable[..., None], tuple[Any, ...], Tensor]] = [
        (tensorwise.cast, (inputs, of_inputs), inputs),
        (tensorwise.swiglu, (inputs, result), inputs),
        (tensorwise.swiglu_backward, (gradients, inputs, of_inputs), gradients),
    ]
    for function, given, spoiled in calls:
        function(*given)
        assert flag.item() == 0, function
        spoiled[100, 130] = value
        function(*given)
        # In the interpreter silu(-inf) is NaN, which is no infinity; compiled, it is -inf (`kernels/swiglu.py`).
        is_nan = function is tensorwise.swiglu and value < 0 and IS_INTERPRETED
        assert flag.item() == (abs(value) == float("inf") and not is_nan), function
        spoiled[100, 130] = 1.0
        flag.zero_()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_types_and_programs_without_a_tile(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorwise, "PROGRAMS", 32)
    inputs, codes = drawn(TOKENS, WIDTH).to(dtype), empty_codes(TOKENS, WIDTH, E4M3)
    tensorwise.cast(inputs, codes)
    check_codes(codes, inputs, E4M3)


@FORMATS
def test_swiglu_forward_and_backward_where_its_sigmoid_is_exact(fmt: Format) -> None:
    """At 0 the sigmoid is 1/2, and 1 from 64 on, so that torch's products equal the kernels' bitwise.

    The scale is that of the products before they are rounded, as in Transformer Engine.
    """
    gates = torch.randint(0, 128, (TOKENS, WIDTH), generator=torch.Generator().manual_seed(2)).float()
    gates = gates.where(gates >= 64, 0.0)
    inputs = torch.cat([gates.bfloat16().to(DEVICE), drawn(TOKENS, WIDTH, 3)], dim=1)
    gradients = drawn(TOKENS, WIDTH, 4)
    a, b = (x.float() for x in inputs.chunk(2, dim=1))
    s, dy = torch.sigmoid(a), gradients.float()
    forward, backward = empty_codes(TOKENS, WIDTH, fmt), empty_codes(TOKENS, 2 * WIDTH, fmt)
    tensorwise.swiglu(inputs, forward)
    y = a * s * b
    check_codes(forward, y, fmt, rounded=y.bfloat16())
    tensorwise.swiglu_backward(gradients, inputs, backward)
    dx = torch.cat([(a * (s * (1 - s)) + s) * dy * b, a * s * dy], dim=1)
    check_codes(backward, dx, fmt, rounded=dx.bfloat16())


def with_one(value: float) -> Callable[[tuple[int, int]], Tensor]:
    return lambda shape: torch.ones(shape).index_put((torch.tensor(77), torch.tensor(200)), torch.tensor(value))


SIZES: dict[str, Callable[[tuple[int, int]], Tensor]] = {
    "alike": lambda shape: torch.ones(shape),
    "of other sizes in other channels": lambda shape: torch.logspace(-3, 2, shape[1]).expand(shape),
    "of other sizes at other tokens": lambda shape: torch.logspace(-3, 2, shape[0])[:, None].expand(shape),
    "one large": with_one(1e4),
    "zero": torch.zeros,
    "tiny": lambda shape: torch.full(shape, 1e-38),
    "one infinite": with_one(torch.inf),
    "one NaN": with_one(torch.nan),
}


@pytest.mark.parametrize("gradient_sizes", SIZES)
@pytest.mark.parametrize("input_sizes", SIZES)
def test_gradients_skipped_by_their_factors_do_not_determine_the_amax(input_sizes: str, gradient_sizes: str) -> None:
    """Codes and scale equal those with all gradients read."""
    tokens, width = 256, 256
    inputs = (torch.randn(tokens, 2 * width) * SIZES[input_sizes]((tokens, 2 * width))).bfloat16().to(DEVICE)
    gradients = (torch.randn(tokens, width) * SIZES[gradient_sizes]((tokens, width))).bfloat16().to(DEVICE)
    found = []
    for are_noted in (True, False):
        inputs = inputs.clone()
        if are_noted:
            tensorwise.swiglu(inputs, empty_codes(tokens, width, E4M3))
        assert (annotation(inputs, "factors") is not None) == are_noted
        found.append(empty_codes(tokens, 2 * width, E5M2))
        tensorwise.swiglu_backward(gradients, inputs, found[-1])
    for name in ("scale_inv", "rows", "columns"):
        one, other = (getattr(codes, name) for codes in found)
        assert torch.equal(one, other), name


def test_nan_gradients_are_ignored_in_the_amax() -> None:
    """Also complete tiles of them."""
    inputs, gradients = drawn(TOKENS, 2 * WIDTH, 9, "one size"), drawn(TOKENS, WIDTH, 10, "one size")
    scales = []
    for value in (0.0, torch.nan):
        gradients[:64] = value
        codes = empty_codes(TOKENS, 2 * WIDTH, E4M3)
        tensorwise.swiglu_backward(gradients, inputs, codes)
        scales.append(codes.scale_inv.item())
    assert scales[0] == scales[1] != 1


def test_inputs_of_small_gradients_are_not_read() -> None:
    inputs, gradients = drawn(TOKENS, 2 * WIDTH, 7, "one size"), drawn(TOKENS, WIDTH, 8, "one size")
    scales = []
    for factor in (torch.inf, 0.0, None):
        if factor is not None:
            annotate(inputs, "factors", torch.full((WIDTH // 128, TOKENS), factor, device=DEVICE))
        else:
            inputs.add_(0)  # no longer the recorded value
        codes = empty_codes(TOKENS, 2 * WIDTH, E4M3)
        tensorwise.swiglu_backward(gradients, inputs, codes)
        scales.append(codes.scale_inv.item())
    assert scales[0] == scales[2] != 1 and scales[1] == 1, "an amax of zero has a scale of 1"


def test_swiglu_forward_and_backward_against_the_formula() -> None:
    """Within a step of E4M3, of BF16, and the loss of FP8 numbers below the smallest normal one."""
    inputs, gradients = drawn(TOKENS, 2 * WIDTH, 5, "one size"), drawn(TOKENS, WIDTH, 6, "one size")
    result, gradient = swiglu_with_gradient(inputs, gradients)
    forward, backward = empty_codes(TOKENS, WIDTH, E4M3), empty_codes(TOKENS, 2 * WIDTH, E4M3)
    tensorwise.swiglu(inputs, forward)
    tensorwise.swiglu_backward(gradients, inputs, backward)
    for codes, values in ((forward, result), (backward, gradient)):
        error = (codes.rows.view(torch.float8_e4m3fn).double() * codes.scale_inv.double() - values).abs()
        smallest = codes.scale_inv.double() * 2**-10
        assert (error <= values.abs() * (2**-4 + 2**-8) + smallest * 1.01 + 1e-5).all()


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_rows_or_columns_alone(side: str) -> None:
    inputs = drawn(TOKENS, WIDTH)
    whole, own = empty_codes(TOKENS, WIDTH, E4M3), empty_codes(TOKENS, WIDTH, E4M3)
    tensorwise.cast(inputs, whole)
    given = {"rows": None, "columns": None} | {side: getattr(own, side)}
    tensorwise.cast(inputs, TensorwiseOutput(**given, scale_inv=own.scale_inv, spec=own.spec, is_power_of_two=False))
    assert torch.equal(getattr(own, side), getattr(whole, side)) and torch.equal(own.scale_inv, whole.scale_inv)
