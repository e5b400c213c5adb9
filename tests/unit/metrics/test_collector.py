"""Fast statistics from codes compared with the slow ones of metrics/quantization_error.py, for every recipe's rules.

By torch operations, and by the kernel where there is a GPU or, on a machine without one, `pip install triton
'numpy<2.3'` and TRITON_INTERPRET=1.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import interpreter
import pytest
import torch
from interpreter import DEVICE, HAS_KERNELS, IS_INTERPRETED, NO_KERNELS
from torch import Tensor

from megafp8.mcore import cpu_patches

cpu_patches.install()

from small_run import FOUR_LAYERS, small_config

from megafp8.metrics import accumulators, collector
from megafp8.metrics.collector import TensorObserver, add_statistics, build_statistics_plan, collect, quantize_what_if
from megafp8.metrics.quantization_error import quantization_stats
from megafp8.metrics.recipe_comparison import element_scales, sample_distribution
from megafp8.metrics.records import TensorStats
from megafp8.metrics.tensor_table import LOCAL_DB_LIMIT, StatisticsTable
from megafp8.quantization.delayed_scaling import DelayedScale
from megafp8.quantization.fp8_parameter import QuantizedParameter, WeightCodes, quantize_assigned_weights
from megafp8.quantization.nvfp4 import hadamard_transform
from megafp8.quantization.quantize import dequantize, quantize
from megafp8.quantization.quantized_tensor import Quantized
from megafp8.recipes import blockwise, delayed, mxfp8, nvfp4, tensorwise
from megafp8.recipes.base import Gemm, LinearRecipe, Operand, OperandRule

RECIPES = (
    tensorwise.build("hybrid"),
    delayed.build("hybrid", fp8_margin=1),
    blockwise.build("hybrid"),
    mxfp8.build("e4m3"),
    nvfp4.build("e2m1"),
)
RULES = [
    pytest.param(rule, id=f"{recipe.name}-{operand.value}-{gemm.value}")
    for recipe in RECIPES
    for operand, gemm, rule in recipe.rules
]
FLOORED = mxfp8.build("e4m3", fp8_e8m0_floor=True).rule(Operand.INPUT, Gemm.FPROP)
NEEDS_TRITON = pytest.mark.skipif(not HAS_KERNELS, reason=NO_KERNELS)
DEVICES = ["torch", pytest.param("kernel", marks=[NEEDS_TRITON, *([] if IS_INTERPRETED else [pytest.mark.gpu])])]
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-log-interval 1"


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of the tensors: torch operations on a CPU, or the kernel."""
    if request.param == "torch":
        return "cpu"
    from megafp8.kernels import statistics

    monkeypatch.setattr(statistics, "PROGRAMS", 5)  # so that each has many rows
    if IS_INTERPRETED:
        interpreter.exact_bf16(monkeypatch)
        monkeypatch.setattr(collector, "has_kernels", lambda tensor: True)
    return DEVICE


def wide(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values over many octaves, some zero, complete blocks of zeros, and an outlier."""
    generator = torch.Generator().manual_seed(rows * columns)
    values = torch.randn(rows, columns, generator=generator) * torch.exp2(torch.arange(columns) % 29 - 24.0)
    values[torch.rand(rows, columns, generator=generator) < 0.1] = 0
    values[: rows // 2, : columns // 2] = 0
    values[-1, -1] = 300.0
    return values.to(dtype)


def scale_of(rule: OperandRule) -> DelayedScale | None:
    """A scale that is too large for the largest values, so that they saturate."""
    return DelayedScale(torch.tensor(7.0), None) if rule.scale_rule.name == "DELAYED" else None


def quantized_by(values: Tensor, rule: OperandRule) -> Quantized:
    generator = torch.Generator().manual_seed(0) if rule.is_stochastic else None
    return quantize(values, rule, delayed=scale_of(rule), generator=generator)


def on(device: str, quantized: Quantized) -> Quantized:
    """The same on another device."""
    parts = (quantized.codes, quantized.dequant_scale, quantized.tensor_scale)
    codes, scale, of_tensor = (None if each is None else each.to(device) for each in parts)
    return Quantized(codes, scale, of_tensor, quantized.rule)


def table_of(*pairs: tuple[Tensor, Quantized], device: str = "cpu") -> StatisticsTable:
    table = StatisticsTable(["x"], torch.device(device))
    for values, quantized in pairs:
        add_statistics(table, "x", values.to(device), on(device, quantized), margin=1, first_channel=0)
    table.flush()
    return table


def stats_of(table: StatisticsTable, rule: OperandRule) -> TensorStats:
    stats = table.stats("x", rule.format.name, 1 + (1 << rule.format.exponent_bits))
    assert stats is not None
    return stats


def mean_local(values: Tensor, dequantized: Tensor) -> float:
    """Run by run."""
    found = []
    for x, y in zip(values.double(), dequantized.double(), strict=True):
        for start in range(0, len(x), 32):
            signal = x[start : start + 32].square().sum().item()
            noise = (x - y)[start : start + 32].square().sum().item()
            if signal:
                decibels = 10 * math.log10(signal / noise) if noise else math.inf
                found.append(min(max(decibels, 0.0), LOCAL_DB_LIMIT))
    return sum(found) / len(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", [*RULES, pytest.param(FLOORED, id="mxfp8-floor")])
def test_statistics_equal_the_slow_reference(
    rule: OperandRule, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulators, "CHUNK_VALUES", 3000)
    values = wide(48, 198, dtype)
    quantized = quantized_by(values, rule)
    rows = hadamard_transform(values) if rule.is_transformed else values
    decoded = dequantize(quantized)
    slow = quantization_stats(rows, decoded, element_scales(quantized), rule.format.max)
    found = stats_of(table_of((values, quantized), device=device), rule)
    assert (found.num_values, found.num_non_finite, found.amax) == (slow.num_values, 0, slow.amax)
    assert found.underflow_fraction == slow.underflow_fraction
    assert found.saturated_fraction == slow.saturated_fraction
    used = element_scales(quantized)[decoded != 0]  # one of two-level scales may be zero
    assert 1 / found.quant_scale_max == pytest.approx(used.min().item(), rel=1e-6)
    assert 1 / found.quant_scale_min == pytest.approx(used.max().item(), rel=1e-6)
    assert found.scale_spread_octaves == pytest.approx(torch.log2(used.max() / used.min()).item(), abs=1e-4)
    assert found.sqnr_db == pytest.approx(slow.sqnr_db, abs=1e-4)
    assert found.mean_local_sqnr_db == pytest.approx(mean_local(rows, decoded), abs=1e-3)
    assert sum(found.exponent_counts) == values.numel()
    if rule.scale_rule.name != "TWO_LEVEL":
        assert found.exponent_counts[0] == (decoded == 0).sum()
    assert (found.staleness_octaves is not None) == (rule.scale_rule.name == "DELAYED")


def test_the_examples_show_every_kind_of_loss(device: str) -> None:
    rule = RECIPES[1].rule(Operand.INPUT, Gemm.FPROP)
    values = wide(48, 198)
    found = stats_of(table_of((values, quantized_by(values, rule)), device=device), rule)
    assert found.underflow_fraction > 0.1
    assert found.saturated_fraction > 0
    assert found.staleness_octaves == pytest.approx(math.log2(300 * 7 / (448 / 2)), rel=1e-6)
    assert (found.outlier_channel, found.outlier_octaves) == (197, pytest.approx(math.log2(300 / 0.0122), abs=3))


def test_blocks_whose_scale_rounds_to_zero_are_not_saturated(device: str) -> None:
    """All of an NVFP4 tensor in which one value determines the range, except for that value's block and zeros."""
    rule = RECIPES[4].rule(Operand.INPUT, Gemm.FPROP)
    values = torch.full((32, 64), 2.0**-9, dtype=torch.bfloat16)
    values[0, 0], values[16] = 4096.0, 0
    found = stats_of(table_of((values, quantized_by(values, rule)), device=device), rule)
    assert (found.saturated_fraction, found.underflow_fraction) == (0, 1 - 1 / (31 * 64))


def test_a_bound_between_two_bf16_values_saturates_the_upper_one(device: str) -> None:
    """BF16 has 298 and 300. The largest number within the scale is 299.5, which BF16 would round to 300."""
    rule = RECIPES[1].rule(Operand.INPUT, Gemm.FPROP)
    values = wide(48, 198)
    quantized = quantize(values, rule, delayed=DelayedScale(torch.tensor(448 / 299.5), None))
    found = stats_of(table_of((values, quantized), device=device), rule)
    assert found.saturated_fraction == 1 / values.numel()


@pytest.mark.parametrize("rule", RULES[: -len(RECIPES[-1].rules)])
def test_statistics_of_shards_add_up_to_the_full_tensor(rule: OperandRule) -> None:
    """Shards on two ranks whose tensors share their scale: equal to the full tensor on one rank. (Scales of NVFP4's
    blocks are relative to a rank's own amax.)"""
    values = wide(256, 256)
    halves = values[:128], values[128:]
    group_amax = values.abs().max()
    if rule.block is None and scale_of(rule) is None:
        for half in halves:
            half[0, 0] = group_amax  # as an all-reduce would make the scales
    whole = stats_of(table_of((values, quantized_by(values, rule))), rule)
    parts = stats_of(table_of(*((half, quantized_by(half, rule)) for half in halves)), rule)
    for name, value in vars(whole).items():
        if name not in ("outlier_octaves", "outlier_channel"):
            assert vars(parts)[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), name


@pytest.mark.parametrize("recipe", RECIPES[:4], ids=lambda recipe: recipe.name)
def test_nonfinite_values_are_counted_and_excluded(recipe: LinearRecipe, device: str) -> None:
    rule = recipe.rule(Operand.INPUT, Gemm.FPROP)
    values = wide(32, 64)
    values[0, 0], values[1, 1], values[2, 2] = math.nan, math.inf, -math.inf
    quantized = quantized_by(values, rule)
    found = stats_of(table_of((values, quantized), device=device), rule)
    slow = quantization_stats(values, dequantize(quantized), element_scales(quantized), rule.format.max)
    assert (found.num_non_finite, found.amax) == (3, slow.amax)
    assert found.underflow_fraction == slow.underflow_fraction
    assert found.sqnr_db == pytest.approx(slow.sqnr_db, abs=1e-4)


def test_an_infinity_that_spoils_all_scales_does_not_stop_the_statistics(device: str) -> None:
    """NVFP4's scales are relative to the tensor's amax."""
    rule = RECIPES[4].rule(Operand.INPUT, Gemm.FPROP)
    values = wide(32, 64)
    values[1, 1] = math.inf
    table = table_of((values, quantized_by(values, rule)), device=device)
    assert stats_of(table, rule).num_non_finite == 1


def test_zeros_have_neither_scale_nor_noise(device: str) -> None:
    for recipe in RECIPES:
        rule = recipe.rule(Operand.INPUT, Gemm.FPROP)
        values = torch.zeros(32, 32, dtype=torch.bfloat16)
        found = stats_of(table_of((values, quantized_by(values, rule)), device=device), rule)
        assert (found.amax, found.underflow_fraction, found.saturated_fraction) == (0, 0, 0)
        assert (found.sqnr_db, found.mean_local_sqnr_db, found.quant_scale_min, found.outlier_octaves) == (None,) * 4


def test_weights_without_high_precision_have_no_error() -> None:
    rule = RECIPES[0].rule(Operand.WEIGHT, Gemm.FPROP)
    weight = torch.nn.Parameter(QuantizedParameter(WeightCodes(wide(32, 32), rule)))
    quantize_assigned_weights([torch.nn.ParameterList([weight])])
    found = stats_of(table_of((weight, weight.codes.quantized())), rule)
    assert (found.num_values, found.amax) == (1024, 300.0)
    assert (found.sqnr_db, found.underflow_fraction, found.saturated_fraction) == (None,) * 3


# --- observed tensors
# --------------------------------------------------------------------------------------------------


def plan_of(flags: str) -> Any:
    config = small_config("llama", flags)
    return build_statistics_plan(config.model, config.precision, config.logging)


def test_tensors_have_names_by_layer_operand_and_side() -> None:
    patterns = "layers.1.linear_fc*,layers.0.linear_qkv"
    plan = plan_of(f"{FP8} --fp8-log-layers {patterns} --fp8-what-if mxfp8")
    assert plan.linears == ("layers.0.linear_qkv", "layers.1.linear_fc1", "layers.1.linear_fc2")
    own = [each.name for each in plan.tensors() if not each.is_what_if and each.linear == "layers.1.linear_fc1"]
    assert own == [f"layers.1.linear_fc1.{operand.value}" for operand in Operand]
    tried = {each.row for each in plan.tensors() if each.is_what_if and each.operand is Operand.INPUT}
    assert "layers.0.linear_qkv.input.row|mxfp8" in tried and "layers.0.linear_qkv.input.column|mxfp8" in tried
    assert len(plan.rows()) == len(set(plan.rows())) == 3 * (1 + 3 + 6)


def test_layers_in_high_precision_are_excluded() -> None:
    plan = plan_of(f"{FP8} {FOUR_LAYERS} --first-last-layers-bf16")
    assert {name.split(".")[1] for name in plan.linears} == {"1", "2"}


def test_each_operand_is_observed_once() -> None:
    plan = plan_of(FP8)
    table = StatisticsTable(plan.rows(), torch.device("cpu"))
    observer = TensorObserver(plan, table, "layers.0.linear_qkv", torch.Generator(), first_channel=64)
    rule = plan.recipe.rule(Operand.INPUT, Gemm.FPROP)
    for amax in (1.0, 2.0):
        values = torch.full((16, 16), 0.5).bfloat16()
        values[0, 3] = amax * 16
        observer(Operand.INPUT, values, {Gemm.FPROP: quantize_what_if(values, [rule], torch.Generator())[0]})
    table.flush()
    tensors, what_if = collect(plan, table)
    assert list(tensors) == ["layers.0.linear_qkv.input"] and not what_if
    assert (tensors["layers.0.linear_qkv.input"].amax, tensors["layers.0.linear_qkv.input"].outlier_channel) == (16, 67)


def test_channel_statistics_on_request(device: str) -> None:
    """What-if recipes have none, and their other statistics are unchanged."""
    values, rule = wide(40, 200), mxfp8.build("e4m3").rule(Operand.INPUT, Gemm.FPROP)
    found = []
    for first_channel in (0, None):
        table = StatisticsTable(["x"], torch.device(device))
        add_statistics(
            table, "x", values.to(device), on(device, quantized_by(values, rule)), first_channel=first_channel
        )
        table.flush()
        found.append(stats_of(table, rule))
    requested, unrequested = found
    assert requested.outlier_channel is not None
    assert unrequested == dataclasses.replace(requested, outlier_channel=None, outlier_octaves=None)


def what_if(source: str) -> dict[str, TensorStats]:
    """The effect of every recipe on the input of a linear, by recipe."""
    flags = f"{FP8} --fp8-log-layers layers.0.linear_qkv --fp8-what-if tensorwise,blockwise,mxfp8,nvfp4"
    plan = plan_of(flags)
    table = StatisticsTable(plan.rows(), torch.device("cpu"))
    observer = TensorObserver(plan, table, "layers.0.linear_qkv", torch.Generator())
    observer(Operand.INPUT, sample_distribution(source), {})
    table.flush()
    _, tried = collect(plan, table)
    return {
        recipe: tensors.get("layers.0.linear_qkv.input.row") or tensors["layers.0.linear_qkv.input"]
        for recipe, tensors in tried.items()
    }


def test_block_scales_are_better_only_with_outliers() -> None:
    """Without outliers FP8's recipes are equal within the rounding of scales. With them a per-tensor scale loses the
    other values, and smaller blocks keep more. FP4 is 11 dB worse than FP8 without them."""
    calm, loud = what_if("normal:256x1024"), what_if("outliers:256x1024:100000")
    assert abs(calm["blockwise"].mean_local_sqnr_db - calm["tensorwise"].mean_local_sqnr_db) < 0.5
    assert abs(calm["mxfp8"].mean_local_sqnr_db - calm["tensorwise"].mean_local_sqnr_db) < 0.5
    assert calm["tensorwise"].sqnr_db - calm["nvfp4"].sqnr_db == pytest.approx(11, abs=1)
    assert calm["tensorwise"].underflow_fraction < 0.01
    order = ("mxfp8", "blockwise", "tensorwise")
    local = [loud[name].mean_local_sqnr_db for name in order]
    assert local == sorted(local, reverse=True) and local[1] > local[2] + 20, local
    lost = [loud[name].underflow_fraction for name in order]
    assert lost == sorted(lost) and lost[0] < lost[1] < lost[2], lost
    assert lost[2] > 10 * lost[1], lost
