"""Casts and SwiGLU into blockwise FP8 in one kernel, against torch operations: every code and every scale.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import interpreter
import pytest
import torch
from interpreter import DEVICE
from swiglu_reference import swiglu_with_gradient
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.kernels import blockwise
from megafp8.kernels.blockwise import BlockwiseOutput
from megafp8.kernels.rounding import format_spec
from megafp8.kernels.tiles import has_complete_tiles
from megafp8.quantization.quantize import quantize_by_torch
from megafp8.quantization.rounding import CODE_DTYPES
from megafp8.recipes.base import OperandRule, ScaleRule
from megafp8.recipes.formats import E4M3, E5M2, Format

pytestmark = pytest.mark.usefixtures("exact")

TOKENS, WIDTH = 256, 384
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
SCALES = pytest.mark.parametrize("is_power_of_two", [True, False], ids=["pow2", "fp32"])


def drawn(tokens: int, width: int, seed: int) -> Tensor:
    """Numbers of many sizes, with a block of zeros, an infinity and NaN, and a row so small that scales overflow."""
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-5, 4, width)
    x[:128, 128:256] = 0
    x[130, 7], x[140, 300], x[200] = float("inf"), float("nan"), x[200] * 1e-37
    return x.bfloat16().to(DEVICE)


def empty_blocks(tokens: int, width: int, fmt: Format, is_power_of_two: bool) -> BlockwiseOutput:
    return BlockwiseOutput(
        row_codes=torch.zeros(tokens, width, dtype=torch.uint8, device=DEVICE),
        row_scales=torch.zeros(width // 128, tokens, device=DEVICE),
        column_codes=torch.zeros(width, tokens, dtype=torch.uint8, device=DEVICE),
        column_scales=torch.zeros(tokens // 128, width, device=DEVICE),
        spec=format_spec(fmt),
        is_power_of_two=is_power_of_two,
    )


def check_blocks(blocks: BlockwiseOutput, values: Tensor, fmt: Format) -> None:
    rule = ScaleRule.POWER_OF_TWO if blocks.is_power_of_two else ScaleRule.FP32
    rows = quantize_by_torch(values, OperandRule(format=fmt, block=(1, 128), scale_rule=rule))
    columns = quantize_by_torch(values, OperandRule(format=fmt, block=(128, 1), scale_rule=rule))
    assert torch.equal(blocks.row_codes, rows.codes.view(torch.uint8))
    assert torch.equal(blocks.row_scales.t(), rows.dequant_scale)
    assert torch.equal(blocks.column_codes.t(), columns.codes.view(torch.uint8))
    assert torch.equal(blocks.column_scales, columns.dequant_scale)


@FORMATS
@SCALES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_cast(dtype: torch.dtype, fmt: Format, is_power_of_two: bool) -> None:
    inputs, blocks = drawn(TOKENS, WIDTH, 1).to(dtype), empty_blocks(TOKENS, WIDTH, fmt, is_power_of_two)
    blockwise.cast(inputs, blocks)
    check_blocks(blocks, inputs, fmt)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 3e38])
@pytest.mark.parametrize("has_columns", [True, False])
def test_a_cast_flags_an_infinity(value: float, has_columns: bool) -> None:
    inputs = torch.ones(TOKENS, WIDTH, device=DEVICE)
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    blocks = dataclasses.replace(empty_blocks(TOKENS, WIDTH, E4M3, True), infinity=flag)
    if not has_columns:
        blocks = dataclasses.replace(blocks, column_codes=None, column_scales=None)
    blockwise.cast(inputs, blocks)
    assert flag.item() == 0
    inputs[200, 130] = value
    blockwise.cast(inputs, blocks)
    assert flag.item() == (abs(value) == float("inf"))


def test_swiglu_and_its_gradients_flag_an_infinity() -> None:
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    inputs, gradients = torch.ones(TOKENS, 2 * WIDTH, device=DEVICE), torch.ones(TOKENS, WIDTH, device=DEVICE)
    result = dataclasses.replace(empty_blocks(TOKENS, WIDTH, E4M3, True), infinity=flag)
    of_inputs = dataclasses.replace(empty_blocks(TOKENS, 2 * WIDTH, E4M3, True), infinity=flag)
    blockwise.swiglu(inputs, result)
    blockwise.swiglu_backward(gradients, inputs, of_inputs)
    assert flag.item() == 0
    gradients[7, 9] = torch.inf
    blockwise.swiglu_backward(gradients, inputs, of_inputs)
    assert flag.item() == 1
    inputs[7, WIDTH + 9] = torch.inf
    blockwise.swiglu(inputs, dataclasses.replace(result, infinity=flag.zero_()))
    assert flag.item() == 1


def where_sigmoid_is_exact() -> Tensor:
    """Inputs [T, 2 W] with gates whose sigmoid is 1/2 or 1: torch's products equal the kernels' bitwise."""
    gates = torch.randint(0, 3, (TOKENS, WIDTH), generator=torch.Generator().manual_seed(2)) * 64.0
    return torch.cat([gates.bfloat16().to(DEVICE), drawn(TOKENS, WIDTH, 3)], dim=1)


@FORMATS
@SCALES
def test_swiglu_where_its_sigmoid_is_exact(fmt: Format, is_power_of_two: bool) -> None:
    inputs, blocks = where_sigmoid_is_exact(), empty_blocks(TOKENS, WIDTH, fmt, is_power_of_two)
    a, b = (x.float() for x in inputs.chunk(2, dim=1))
    blockwise.swiglu(inputs, blocks)
    check_blocks(blocks, (a * torch.sigmoid(a) * b).bfloat16(), fmt)


@FORMATS
@SCALES
def test_gradients_where_the_sigmoid_is_exact(fmt: Format, is_power_of_two: bool) -> None:
    inputs, blocks = where_sigmoid_is_exact(), empty_blocks(TOKENS, 2 * WIDTH, fmt, is_power_of_two)
    gradients = drawn(TOKENS, WIDTH, 4)
    a, b = (x.float() for x in inputs.chunk(2, dim=1))
    s, dy = torch.sigmoid(a), gradients.float()
    blockwise.swiglu_backward(gradients, inputs, blocks)
    check_blocks(blocks, torch.cat([(a * (s * (1 - s)) + s) * dy * b, a * s * dy], dim=1).bfloat16(), fmt)


def values_of(blocks: BlockwiseOutput, fmt: Format) -> tuple[Tensor, Tensor]:
    """Of rows and of columns."""
    rows, columns = (codes.view(CODE_DTYPES[fmt.name]).float() for codes in (blocks.row_codes, blocks.column_codes))
    return (
        rows * blocks.row_scales.t().repeat_interleave(128, dim=1),
        columns.t() * blocks.column_scales.repeat_interleave(128, dim=0),
    )


def check_values(blocks: BlockwiseOutput, expected: Tensor) -> None:
    """Within a step of E4M3, of BF16, and the loss of FP8 numbers below the smallest normal one."""
    for values in values_of(blocks, E4M3):
        error = (values.double() - expected).abs()
        assert (error <= expected.abs() * (2**-4 + 2**-8) + 16 * 2**-9 / 448 + 1e-5).all()


def test_swiglu_against_the_formula() -> None:
    inputs = torch.randn(TOKENS, 2 * WIDTH, generator=torch.Generator().manual_seed(5)).bfloat16().to(DEVICE)
    a, b = inputs.double().chunk(2, dim=1)
    blocks = empty_blocks(TOKENS, WIDTH, E4M3, True)
    blockwise.swiglu(inputs, blocks)
    check_values(blocks, torch.nn.functional.silu(a) * b)


def test_gradients_against_the_formula() -> None:
    inputs, gradients = (
        torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(6)).bfloat16().to(DEVICE)
        for width in (2 * WIDTH, WIDTH)
    )
    _, gradient = swiglu_with_gradient(inputs, gradients)
    blocks = empty_blocks(TOKENS, 2 * WIDTH, E4M3, True)
    blockwise.swiglu_backward(gradients, inputs, blocks)
    check_values(blocks, gradient)


@pytest.mark.parametrize("kernel", [blockwise.cast, blockwise.swiglu])
def test_rows_or_columns_alone(kernel: Callable[[Tensor, BlockwiseOutput], None]) -> None:
    width = WIDTH if kernel is blockwise.cast else 2 * WIDTH
    inputs = drawn(TOKENS, width, 1)
    whole = empty_blocks(TOKENS, WIDTH, E4M3, True)
    kernel(inputs, whole)
    parts = {"row_codes": None, "row_scales": None, "column_codes": None, "column_scales": None}
    for side in ("row", "column"):
        own = empty_blocks(TOKENS, WIDTH, E4M3, True)
        names = [name for name in parts if name.startswith(side)]
        given = parts | {name: getattr(own, name) for name in names}
        kernel(inputs, BlockwiseOutput(**given, spec=own.spec, is_power_of_two=True))
        assert all(torch.equal(getattr(own, name), getattr(whole, name)) for name in names)


@pytest.mark.parametrize(
    ("tokens", "width", "fits"), [(128, 256, True), (0, 128, False), (192, 128, False), (128, 64, False)]
)
def test_partial_tiles_are_refused(tokens: int, width: int, fits: bool) -> None:
    assert has_complete_tiles(tokens, width) is fits
