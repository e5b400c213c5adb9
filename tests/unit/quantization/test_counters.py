"""Counters of non-finite and saturated values: the faults that a quantizer hides are seen, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megafp8.config import flags
from megafp8.config.precision_map import build_recipe
from megafp8.nonfinite.operands import EmulatedCounters
from megafp8.quantization import quantize as quantize_module
from megafp8.quantization.counters import (
    QUANTIZERS,
    count_non_finite_on_device,
    count_saturated_on_device,
    has_exact_block_scales,
    saturation_threshold,
)
from megafp8.quantization.delayed_scaling import DelayedScale
from megafp8.quantization.linear import emulated_linear
from megafp8.quantization.linear_plan import LinearPlan
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.quantization.nvfp4_variants import draw_signs, transformed
from megafp8.quantization.quantize import as_blocks, quantize, quantize_by_torch, quantize_for
from megafp8.quantization.quantized_tensor import Use
from megafp8.quantization.scaling import inspect_block_amax, two_level_scales
from megafp8.recipes.base import OperandRule, ScaleRule
from megafp8.recipes.formats import E2M1, E4M3, E5M2, Format

TENSOR = OperandRule(format=E4M3)
DELAYED = OperandRule(format=E4M3, scale_rule=ScaleRule.DELAYED)
BLOCK = OperandRule(format=E4M3, block=(1, 128), scale_rule=ScaleRule.POWER_OF_TWO)
MXFP8 = OperandRule(format=E4M3, block=(1, 32), scale_rule=ScaleRule.E8M0)
NVFP4 = OperandRule(format=E2M1, block=(1, 16), scale_rule=ScaleRule.TWO_LEVEL)
HADAMARD = OperandRule(format=E2M1, block=(16, 1), scale_rule=ScaleRule.TWO_LEVEL, is_transformed=True)
RULES = {"tensor": TENSOR, "delayed": DELAYED, "block": BLOCK, "mxfp8": MXFP8, "nvfp4": NVFP4, "hadamard": HADAMARD}


def values() -> Tensor:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()


def counts_of(tensor: Tensor, rule: OperandRule, quant_scale: float = 1.0) -> list[int]:
    count = torch.zeros(2, dtype=torch.int64)
    delayed = DelayedScale(torch.tensor(quant_scale), torch.zeros(())) if rule is DELAYED else None
    quantize_for(tensor, [Use(rule)], delayed=delayed, counts=[count])
    return count.tolist()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_clean_values_count_nothing(rule: OperandRule) -> None:
    assert counts_of(values(), rule) == [0, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_non_finite_values_count_exactly(rule: OperandRule, bad: float) -> None:
    tensor = values()
    tensor[3, 5] = tensor[40, 100] = bad
    assert counts_of(tensor, rule)[0] == 2


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda fmt: fmt.name)
def test_threshold_is_half_a_step_beyond_the_largest_number(fmt: Format) -> None:
    assert {E4M3: 464.0, E5M2: 61440.0, E2M1: 7.0}[fmt] == saturation_threshold(fmt)


def test_saturation_under_delayed_scaling() -> None:
    tensor = torch.tensor([[463.0, -463.0, 464.0, -500.0, 1e6, 1.0, torch.inf, torch.nan]])
    assert counts_of(tensor[:, :2], DELAYED) == [0, 0]
    assert counts_of(tensor[:, :6], DELAYED) == [0, 3]
    assert counts_of(tensor, DELAYED) == [2, 3]
    assert counts_of(tensor[:, :1], DELAYED, quant_scale=2.0) == [0, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("quant_scale", [1.0, 3.7, 1e-3, 123.456])
def test_saturation_is_exact_in_every_dtype(dtype: torch.dtype, quant_scale: float) -> None:
    tensor = (torch.randn(64, 128, generator=torch.Generator().manual_seed(2)) * 464 / quant_scale).to(dtype)
    expected = int((((tensor.float() * torch.tensor(quant_scale)).abs() >= 464) & tensor.isfinite()).sum())
    assert counts_of(tensor, DELAYED, quant_scale)[1] == expected


def test_values_beside_an_infinity_saturate() -> None:
    tensor = torch.full((1, 256), 1000.0)
    tensor[0, 0] = torch.inf
    assert counts_of(tensor, BLOCK) == [1, 127], "only those of its block, whose scale is 1"
    assert counts_of(tensor, TENSOR) == [1, 255]


def test_block_scale_that_is_rounded_down_saturates() -> None:
    tensor = torch.ones(1, 48)
    tensor[0, 16:32] = 1.4 * 2.0**-9 / 448  # the block's E4M3 scale would be 1.4 x 2^-9, and becomes 2^-9
    tensor[0, 32:] = 0.4 * 2.0**-9 / 448  # becomes zero, with all values
    assert quantize(tensor, NVFP4).dequant_scale.float().tolist() == [[448.0, 2.0**-9, 0.0]]
    assert counts_of(tensor, NVFP4) == [0, 16]


def test_two_level_scales_saturate_only_where_they_are_subnormal() -> None:
    """Amaxes over all octaves, among them those that round a normal scale down the most: 17 / 16 of a power of two."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.arange(-40, 1).repeat_interleave(8)
    amaxes = 2.0**exponents * torch.cat([torch.tensor([1.0, 1.0624, 1.1, 1.24, 1.4, 1.5, 1.9, 1.99])] * 41)
    tensor = (2 * torch.rand(len(amaxes), 16, generator=generator) - 1) * amaxes[:, None]
    tensor[:, 0] = amaxes
    quantized = quantize(tensor, NVFP4)
    scale = quantized.dequant_scale.float() * quantized.tensor_scale
    scaled = torch.where(scale > 0, tensor / scale, torch.zeros(()))
    num_beyond = int((scaled.abs() >= 7).sum())
    assert counts_of(tensor, NVFP4) == [0, num_beyond] and num_beyond > 0
    is_normal = quantized.dequant_scale.view(torch.uint8).flatten() >= 8
    assert scaled[is_normal].abs().max() < 6.4
    assert has_exact_block_scales(quantized.dequant_scale[is_normal])
    assert not has_exact_block_scales(quantized.dequant_scale)
    assert counts_of(tensor[is_normal], NVFP4) == [0, 0]


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_e8m0_scales_rounded_up_saturate_nothing(fmt: Format) -> None:
    """Amaxes of every octave of FP32, and those next to where the scale changes."""
    rule = OperandRule(format=fmt, block=(1, 32), scale_rule=ScaleRule.E8M0)
    edge = torch.tensor(fmt.max)
    edges = torch.stack([edge, edge.nextafter(torch.tensor(0.0)), edge.nextafter(torch.tensor(torch.inf))])
    fractions = torch.cat([edges / 2.0 ** edges.log2().floor(), torch.tensor([1.0, 1.5, 2 - 2**-23])])
    amaxes = torch.ldexp(fractions.expand(254, -1), torch.arange(-126, 128)[:, None]).flatten()
    amaxes = amaxes[amaxes.isfinite()]
    tensor = amaxes[:, None].expand(-1, 32).contiguous()
    scales = quantize(tensor, rule).dequant_scale.float()
    assert (tensor.double() / scales.double()).max().item() <= fmt.max * (1 + 2**-23), "amax / max is rounded in FP32"
    assert counts_of(tensor, rule) == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_scale_is_subnormal_where_amaxes_are_close(dtype: torch.dtype) -> None:
    for binades, largest, is_expected in (
        (0, 1.0, True), (14, 1.0, True), (13, 1.99, True), (15, 1.0, False), (None, 1.0, False)
    ):  # fmt: skip
        tensor = torch.full((1, 32), 0.0 if binades is None else 2.0**-binades, dtype=dtype)
        tensor[0, :16] = largest
        _, is_suspect, is_narrow = inspect_block_amax(as_blocks(tensor, (1, 16)))
        assert not is_suspect and is_narrow is is_expected, binades
        assert not is_narrow or has_exact_block_scales(quantize(tensor, NVFP4).dequant_scale), binades
    tiny = torch.full((1, 32), torch.finfo(dtype).tiny / 4, dtype=dtype)
    assert not inspect_block_amax(as_blocks(tiny, (1, 16)))[2], "subnormal"


def test_counts_do_not_change_the_codes() -> None:
    tensor = values()
    tensor[0, 0] = torch.inf
    for rule in (TENSOR, BLOCK, MXFP8, NVFP4):
        (counted,) = quantize_for(tensor, [Use(rule)], counts=[torch.zeros(2, dtype=torch.int64)])
        assert torch.equal(counted.codes.view(torch.uint8), quantize(tensor, rule).codes.view(torch.uint8))


def test_sums_on_a_device_are_the_same() -> None:
    tensor = torch.tensor([[463.0, -500.0, 1e6, torch.inf, torch.nan]])
    counts = torch.zeros(2, 2, dtype=torch.int64)
    count_non_finite_on_device(tensor, counts.unbind())
    for rule, count in zip((DELAYED, TENSOR), counts, strict=True):
        count_saturated_on_device(tensor[:, None, None], torch.tensor(1.0), rule, [count])
    assert counts.tolist() == [[2, 2], [2, 0]]


def wide() -> Tensor:
    """Blocks whose amaxes are of 24 octaves, so that E4M3 scales of some are subnormal or zero."""
    octaves = torch.linspace(-24, 0, 32)[:, None].exp2()
    return torch.randn(32, 256, generator=torch.Generator().manual_seed(4)) * octaves


SATURATING = {
    "margin": OperandRule(format=E4M3, margin=-3),
    "floor": OperandRule(format=E4M3, block=(1, 32), scale_rule=ScaleRule.E8M0_FLOOR),
    "nvfp4": NVFP4,
    "four-over-six": OperandRule(format=E2M1, block=(1, 16), scale_rule=ScaleRule.FOUR_OVER_SIX),
    "eden": OperandRule(format=E2M1, block=(1, 16), scale_rule=ScaleRule.EDEN, is_transformed=True, is_stochastic=True),
}


@pytest.mark.parametrize("rule", SATURATING.values(), ids=SATURATING)
def test_saturated_values_on_a_device_are_the_same(rule: OperandRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch operations as on a GPU, whose results are not read by the host."""
    found = []
    for is_on_device in (False, True):
        monkeypatch.setattr(quantize_module, "has_kernels", lambda tensor, answer=is_on_device: answer)
        count = torch.zeros(2, dtype=torch.int64)
        generator = torch.Generator().manual_seed(5) if rule.is_stochastic else None
        quantize_by_torch(wide(), rule, generator=generator, counts=[count])
        found.append(count.tolist())
    assert found[0] == found[1] and found[0][1] > 0


def test_saturation_under_eden_is_that_of_the_cast() -> None:
    rule, generator = SATURATING["eden"], torch.Generator().manual_seed(5)
    signs = draw_signs(generator)
    blocks = as_blocks(transformed(wide(), rule, signs), (1, 16))
    amax, *_ = inspect_block_amax(blocks)
    scales = two_level_scales(amax, amax.amax(), top=256 * 6.07, block_max=6.07)
    dequant = (scales.dequant.float().clamp(min=2.0**-9) * scales.tensor)[:, None, :, None]
    count = torch.zeros(2, dtype=torch.int64)
    quantize_by_torch(wide(), rule, generator=generator, signs=signs, counts=[count])
    assert count.tolist() == [0, int((blocks.abs() / dequant >= 7).sum())]


def test_values_saturate_beside_an_infinity_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks share an amax, and an infinite one gives the scale 1."""
    x, count = torch.linspace(-600, 600, 1024).view(4, 256), torch.zeros(2, dtype=torch.int64)
    monkeypatch.setattr(quantize_module, "reduce_amax", lambda amax, group: amax.fill_(torch.inf))
    quantize_by_torch(x, OperandRule(format=E4M3), counts=[count])
    assert count.tolist() == [0, int((x.abs() >= saturation_threshold(E4M3)).sum())] and count[1]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"])
def test_every_quantizer_of_a_linear_is_counted(recipe: str) -> None:
    fp8_or_fp4 = "--fp4-format e2m1" if recipe == "nvfp4" else f"--fp8-format e4m3 --fp8-recipe {recipe}"
    rules = build_recipe(flags.parse(fp8_or_fp4.split()).config.precision)
    assert rules is not None
    noise = RoundingNoise("test") if rules.is_stochastic else None
    counters = EmulatedCounters(("a", "b"), [], torch.device("cpu"))
    plan = LinearPlan(recipe=rules, counts=counters.of_linear("b"), noise=noise)
    x, w = (torch.randn(64, 64).bfloat16().requires_grad_() for _ in range(2))
    with torch.no_grad():
        x[1, 2] = torch.inf
        w[2, 3] = torch.nan
    grad = torch.randn(64, 64).bfloat16()
    grad[5, 5] = -torch.inf
    emulated_linear(x, w, None, plan).backward(grad)
    assert counters.table[0].sum() == 0
    assert counters.table[1, :, 0].tolist() == [1] * len(QUANTIZERS), "one for each use of each operand"
    assert counters.counts()[0] == 6
    counters.reset()
    assert counters.counts().tolist() == [0, 0, 0]
