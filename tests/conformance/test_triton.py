"""The Triton kernels produce the bytes of the torch operations, on a GPU or in Triton's interpreter.

On a machine without a GPU: `pip install triton 'numpy<2.3'`, then

    TRITON_INTERPRET=1 python -m pytest tests/conformance/test_triton.py
"""

from collections.abc import Iterator
from typing import Optional

import interpreter
import pytest
import torch
from interpreter import DEVICE, IS_INTERPRETED
from torch import Tensor

from megafp8.quantization import quantize, scaled_gemm
from megafp8.quantization.counters import (
    NON_FINITE,
    SATURATED,
    count_non_finite_on_device,
    count_saturated_on_device,
    saturation_threshold,
)
from megafp8.quantization.delayed_scaling import DelayedScale
from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.quantization.quantize import decode_values_by_torch, quantize_by_torch
from megafp8.quantization.quantized_tensor import Quantized, Use
from megafp8.quantization.rounding import CODE_DTYPES
from megafp8.recipes import blockwise, mxfp8, nvfp4, tensorwise
from megafp8.recipes.base import FULL_DIM, LinearRecipe, OperandRule, ScaleRule
from megafp8.recipes.formats import E2M1, E4M3, E5M2, Format

interpreter.skip_without_kernels()

from megafp8.quantization import triton_quantize

pytestmark = [] if IS_INTERPRETED else [pytest.mark.gpu]

SHAPES = [(130, 162)] if IS_INTERPRETED else [(256, 512), (257, 130), (2, 65, 162)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


@pytest.fixture(autouse=IS_INTERPRETED)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.make_exact(monkeypatch)


TENSOR_RULES = [
    OperandRule(format=fmt, scale_rule=scale_rule)
    for fmt in (E4M3, E5M2)
    for scale_rule in (ScaleRule.FP32, ScaleRule.POWER_OF_TWO)
]


def pair(fmt: Format, side: int, scale_rule: ScaleRule, **column_options: bool) -> list[OperandRule]:
    """Row blocks and column blocks, as for an operand of two GEMMs."""
    rows = OperandRule(format=fmt, block=(1, side), scale_rule=scale_rule)
    return [rows, OperandRule(format=fmt, block=(side, 1), scale_rule=scale_rule, **column_options)]


def square(fmt: Format, side: int, scale_rule: ScaleRule) -> list[OperandRule]:
    return [OperandRule(format=fmt, block=(side, side), scale_rule=scale_rule)]


BLOCK_RULES = [
    rules
    for fmt in (E4M3, E5M2)
    for rules in (
        pair(fmt, 32, ScaleRule.E8M0),
        pair(fmt, 128, ScaleRule.POWER_OF_TWO),
        pair(fmt, 128, ScaleRule.FP32),
        square(fmt, 128, ScaleRule.POWER_OF_TWO),
        square(fmt, 128, ScaleRule.FP32),
    )
]
BLOCK_RULES += [
    each(E2M1, 16, rule) for rule in (ScaleRule.TWO_LEVEL, ScaleRule.FOUR_OVER_SIX) for each in (pair, square)
]
BLOCK_RULES += [pair(E4M3, 32, ScaleRule.E8M0_FLOOR)]


def plain(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape) * torch.logspace(-4, 3, shape[-1])


def spoiled(shape: tuple[int, ...], *values: float) -> Tensor:
    """Some elements replaced."""
    x = plain(shape)
    x.view(-1)[7 :: x.numel() // (3 * len(values))][: len(values)] = torch.tensor(values)
    return x


def ties(shape: tuple[int, ...]) -> Tensor:
    """Numbers of few digits, many of them in the middle between two codes, under an amax with a power-of-two scale."""
    x = torch.randint(-64, 65, shape) / 64.0 * 2.0 ** torch.randint(-8, 3, shape)
    x.view(-1)[::16] = 448.0
    return x


RECIPES = {
    "tensorwise": tensorwise.build("hybrid"),
    "blockwise": blockwise.build("hybrid"),
    "mxfp8": mxfp8.build("e4m3"),
    "nvfp4": nvfp4.build("e2m1"),
    "four over six": nvfp4.build("e2m1", fp4_four_over_six=True),
    "nvfp4 without extras": nvfp4.build(
        "e2m1", fp4_hadamard=False, fp4_stochastic_rounding=False, fp4_2d_weights=False
    ),
}

INPUTS = {
    "plain": plain,
    "ties": ties,
    "zeros": torch.zeros,
    "negative zeros": lambda shape: -torch.zeros(shape),
    "all equal": lambda shape: torch.full(shape, 0.3),
    "zero blocks": lambda shape: plain(shape) * (torch.arange(shape[-1]) // 48 % 2),
    "NaN": lambda shape: spoiled(shape, float("nan"), -float("nan")),
    "infinity": lambda shape: spoiled(shape, float("inf"), -float("inf")),
    "NaN and infinity": lambda shape: spoiled(shape, float("nan"), float("inf"), -float("inf")),
    "all NaN": lambda shape: torch.full(shape, float("nan")),
    "outlier": lambda shape: spoiled(shape, 1e30),
    "outliers": lambda shape: spoiled(shape, 3e38, -1e-38, 6e4),
    "denormals": lambda shape: torch.randn(shape) * 1e-39,
    "some denormals": lambda shape: plain(shape) * 10.0 ** torch.randint(-40, 3, shape),
    "scales overflow": lambda shape: torch.randn(shape) * 1e-37,
    "FP16 denormals": lambda shape: torch.randn(shape) * 1e-7,
    "amax one above a power": lambda shape: torch.full(shape, 448 * 2.0**-127 * (1 + 2.0**-23)),
}


def check_bits(ours: Optional[Tensor], theirs: Optional[Tensor], what: str = "") -> None:
    """Equal to the bit; any NaN equals any other."""
    if ours is None or theirs is None:
        assert ours is theirs, what
        return
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, what
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.dtype.itemsize]
    equal = ours.view(integer) == theirs.view(integer)
    if ours.dtype.itemsize > 1:
        equal |= ours.isnan() & theirs.isnan()
    if not equal.all():
        wrong = (~equal).nonzero()
        position = tuple(wrong[0].tolist())
        pytest.fail(
            f"{what}: {len(wrong)} of {ours.numel()} differ, first at {position}: {ours[position]}, {theirs[position]}"
        )


def check_uses(x: Tensor, uses: list[Use], generators: Optional[list[torch.Generator]] = None) -> int:
    """All uses together equal each one computed by torch operations, and count as these do on a CPU.

    Returns:
        the number of saturated values, all uses together.
    """
    seeds = [None if generators is None else generator.initial_seed() for generator in generators or uses]
    counts = torch.zeros(len(uses), 2, dtype=torch.int64, device=DEVICE)
    results = triton_quantize.quantize_for(x, uses, generators=generators or (), counts=counts.unbind())
    for use, seed, result, count in zip(uses, seeds, results, counts.cpu(), strict=True):
        generator = None if seed is None else torch.Generator(DEVICE).manual_seed(seed)
        theirs = quantize_by_torch(x, use.rule, generator=generator)
        name = f"{use.rule}, {tuple(x.shape)}"
        if IS_INTERPRETED or not use.rule.is_transformed:  # else sums are in another order than on the CPU
            on_cpu = torch.zeros(2, dtype=torch.int64)
            generator = None if seed is None else torch.Generator().manual_seed(seed)
            quantize_by_torch(x.cpu(), use.rule, generator=generator, counts=[on_cpu])
            assert torch.equal(count, on_cpu), name
        check_bits(result.factor, theirs.factor, f"factor, {name}")
        if use.dtype is not None:
            check_bits(result.values, decode_values_by_torch(theirs, use.dtype), f"values, {name}")
            continue
        check_bits(result.codes, theirs.codes, f"codes, {name}")
        check_bits(result.dequant_scale, theirs.dequant_scale, f"scales, {name}")
        decoded = triton_quantize.decode(theirs, gemm_dtype(use.rule))
        check_bits(decoded, decode_values_by_torch(theirs, gemm_dtype(use.rule)), f"decoded, {name}")
    return int(counts[:, SATURATED].sum())


def gemm_dtype(rule: OperandRule) -> torch.dtype:
    return torch.bfloat16 if rule.is_bf16_exact else torch.float32


def inputs(dtype: torch.dtype) -> Iterator[Tensor]:
    """All kinds of input in all shapes."""
    for kind in INPUTS:
        for shape in SHAPES:
            yield INPUTS[kind](shape).to(dtype).to(DEVICE)


def transformable(shape: tuple[int, ...]) -> Iterator[Tensor]:
    """All kinds of input in BF16, without subnormals on a CPU, whose BF16 products flush them to zero."""
    for kind in INPUTS:
        x = INPUTS[kind](shape).bfloat16().to(DEVICE)
        is_subnormal = (x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)
        if not (IS_INTERPRETED and is_subnormal.any()):
            yield x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", TENSOR_RULES, ids=str)
def test_one_scale(rule: OperandRule, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_quantize, "AMAX_PROGRAMS", 2)  # which take several parts of the tensor
    for x in inputs(dtype):
        check_uses(x, [Use(rule, torch.bfloat16), Use(rule)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rules", BLOCK_RULES, ids=lambda rules: " and ".join(map(str, rules)))
def test_blocks(rules: list[OperandRule], dtype: torch.dtype) -> None:
    num_saturated = 0
    for x in inputs(dtype):
        of_codes = check_uses(x, [Use(rule) for rule in rules])
        assert check_uses(x, [Use(rule, gemm_dtype(rule)) for rule in rules]) == of_codes
        num_saturated += of_codes
    assert num_saturated or not rules[0].scale_rule.is_two_level


def test_one_or_two_kernel_reads_give_equal_codes() -> None:
    x = plain((64, 256)).bfloat16().to(DEVICE)
    rows, columns = pair(E4M3, 32, ScaleRule.E8M0)
    other = square(E4M3, 128, ScaleRule.POWER_OF_TWO)[0]
    whole, larger = OperandRule(format=E4M3), OperandRule(format=E5M2, scale_rule=ScaleRule.POWER_OF_TWO)
    for uses in (
        [Use(rows), Use(whole, torch.bfloat16)],
        [Use(whole), Use(columns, torch.bfloat16), Use(rows)],
        [Use(whole, torch.bfloat16), Use(larger)],
        [Use(columns), Use(rows, torch.bfloat16)],
        [Use(rows, torch.bfloat16), Use(columns)],
        [Use(rows), Use(other, torch.bfloat16)],
        [Use(columns, torch.bfloat16)],
        [Use(other), Use(other, torch.bfloat16)],
    ):
        check_uses(x, uses)


def test_delayed() -> None:
    rule, num_saturated = OperandRule(format=E5M2, scale_rule=ScaleRule.DELAYED), 0
    for x in inputs(torch.bfloat16):
        quant = torch.tensor([3.7, 1e3], device=DEVICE)
        ours, theirs = (DelayedScale(quant[1], torch.tensor([0.0, 0.5], device=DEVICE)[1]) for _ in range(2))
        result, numbers = triton_quantize.quantize_for(x, [Use(rule), Use(rule, torch.bfloat16)], delayed=ours)
        expected = quantize_by_torch(x, rule, delayed=theirs)
        check_bits(result.codes, expected.codes)
        check_bits(result.factor, expected.factor)
        check_bits(numbers.values, decode_values_by_torch(expected, torch.bfloat16))
        check_bits(ours.amax, theirs.amax)
        untouched, counts = DelayedScale(quant[1], None), torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
        (again,) = triton_quantize.quantize_for(x, [Use(rule)], delayed=untouched, counts=[counts[0]])
        check_bits(again.codes, expected.codes)
        count_non_finite_on_device(x, [counts[1]])
        count_saturated_on_device(x[:, None, None], untouched.quant_scale, rule, [counts[1]])
        assert torch.equal(counts[0], counts[1])
        num_saturated += int(counts[0, SATURATED])
    assert num_saturated


ROW = OperandRule(format=E4M3, block=(1, FULL_DIM), scale_rule=ScaleRule.POWER_OF_TWO)
COLUMN = OperandRule(format=E5M2, block=(FULL_DIM, 1), scale_rule=ScaleRule.POWER_OF_TWO)


@pytest.mark.parametrize(
    "rules",
    [
        [OperandRule(format=E4M3)],
        pair(E4M3, 32, ScaleRule.E8M0),
        pair(E2M1, 16, ScaleRule.TWO_LEVEL, is_transformed=True),
        [ROW],
        [ROW, COLUMN],
    ],
    ids=["tensor", "blocks", "transformed", "rows", "rows and columns in two casts"],
)
def test_kernels_count_non_finite_values_themselves(rules: list[OperandRule], monkeypatch: pytest.MonkeyPatch) -> None:
    x = spoiled((128, 256), float("nan"), float("inf"), -float("inf")).bfloat16().to(DEVICE)
    counts = torch.zeros(len(rules), 2, dtype=torch.int64, device=DEVICE)
    monkeypatch.setattr(quantize, "has_kernels", lambda tensor: True)
    monkeypatch.setattr(quantize, "count_non_finite_on_device", None)
    for times in (1, 2):
        quantize.quantize_for(x, [Use(rule) for rule in rules], counts=counts.unbind())
        assert counts[:, NON_FINITE].tolist() == [3 * times] * len(rules)


def test_values_saturate_beside_an_infinity_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks share an amax, and an infinite one gives the scale 1."""
    x = torch.linspace(-600, 600, 4 * 256, device=DEVICE).view(4, 256)
    counts = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    monkeypatch.setattr(triton_quantize, "reduce_amax", lambda amax, group: torch.full_like(amax, torch.inf))
    triton_quantize.quantize_for(x, [Use(OperandRule(format=E4M3))], counts=counts.unbind())
    assert counts[0].tolist() == [0, int((x.abs() >= saturation_threshold(E4M3)).sum())] and counts[0, SATURATED]


def test_torch_operations_where_kernels_run_count_non_finite_values(monkeypatch: pytest.MonkeyPatch) -> None:
    x = spoiled((128, 256), float("nan"), float("inf")).to(DEVICE)
    counts = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    monkeypatch.setattr(quantize, "has_kernels", lambda tensor: True)
    uses = [Use(OperandRule(format=E4M3, margin=1)), Use(OperandRule(format=E4M3))]
    quantize.quantize_for(x, uses, counts=counts.unbind())
    assert counts[:, NON_FINITE].tolist() == [2, 2]


@pytest.mark.parametrize("transforms", [False, True])
def test_stochastic_rounding(transforms: bool) -> None:
    """The same random bytes are used for the same elements."""
    rows, columns = (
        OperandRule(format=E2M1, block=block, scale_rule=ScaleRule.TWO_LEVEL, is_stochastic=True, is_transformed=last)
        for block, last in (((1, 16), False), ((16, 1), transforms))
    )
    for x in transformable((48, 34)) if transforms else inputs(torch.bfloat16):
        for dtype in (None, torch.bfloat16):
            generators = [torch.Generator(DEVICE).manual_seed(seed) for seed in (3, 4)]
            check_uses(x, [Use(rows, dtype), Use(columns, dtype)], generators)


@pytest.mark.parametrize("shape", [(48, 34), (2, 32, 320)])
def test_hadamard_transform(shape: tuple[int, ...]) -> None:
    rules = pair(E2M1, 16, ScaleRule.TWO_LEVEL, is_transformed=True)
    for x in transformable(shape):
        check_uses(x, [Use(rule) for rule in rules])
        check_uses(x, [Use(rule, torch.bfloat16) for rule in rules])
        check_uses(x, [Use(rules[1])])


def test_hadamard_transform_refuses_ragged_groups() -> None:
    with pytest.raises(ValueError, match="groups of 16"):
        triton_quantize.quantize_for(
            torch.ones(24, 32, dtype=torch.bfloat16, device=DEVICE),
            [Use(pair(E2M1, 16, ScaleRule.TWO_LEVEL, is_transformed=True)[1])],
        )


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_every_code_is_decoded(fmt: Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(2, 128).view(CODE_DTYPES[fmt.name])
    scale = torch.tensor([[1.0, 0.5, 2.0, 2.0**-120]] * 2, device=DEVICE)
    (rule, _) = pair(fmt, 32, ScaleRule.FP32)
    for quantized in (
        Quantized(codes, scale, None, rule),
        Quantized(codes, scale[0, 0], None, OperandRule(format=fmt, scale_rule=ScaleRule.FP32)),
    ):
        check_bits(triton_quantize.decode(quantized, torch.float32), decode_values_by_torch(quantized, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gemm_epilogue_is_one_kernel(dtype: torch.dtype, has_bias: bool) -> None:
    product, factor = plain((37, 130)).to(DEVICE), torch.tensor(0.37, device=DEVICE)
    bias = torch.randn(130, device=DEVICE).to(dtype) if has_bias else None
    expected = product * factor if bias is None else product * factor + bias
    check_bits(triton_quantize.finish_product(product, factor, bias, dtype), expected.to(dtype))
    if bias is not None:
        check_bits(triton_quantize.finish_product(product, None, bias, dtype), (product + bias).to(dtype))


@pytest.mark.skipif(IS_INTERPRETED, reason="the linear takes the kernels on a GPU only")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_linear_with_and_without_kernels(
    recipe: LinearRecipe, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same output, gradients and main_grad bitwise, since the GEMMs between them are the same."""
    shapes = ((8, 32, 128), (256, 128), (256,), (8, 32, 256))
    tensors = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    results = []
    for has_kernels in (True, False):
        for module in (quantize, scaled_gemm):
            monkeypatch.setattr(module, "has_kernels", lambda tensor, answer=has_kernels: answer)
        x, w, b, dy = (tensor.clone() for tensor in tensors)
        x, w, b = (torch.nn.Parameter(tensor) for tensor in (x, w, b))
        w.main_grad, w.grad_added_to_main_grad = torch.ones(256, 128, device=DEVICE), False
        noise = RoundingNoise("test") if recipe.is_stochastic else None
        y = emulated_linear(x, w, b, LinearPlan(recipe=recipe, fuse_wgrad=True, noise=noise))
        y.backward(dy)
        results.append((y.detach(), x.grad, w.main_grad, b.grad))
    for ours, theirs in zip(*results, strict=True):
        check_bits(ours, theirs, recipe.name)
