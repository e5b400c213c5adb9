"""Healthy tensors have no warnings under any recipe, and unhealthy ones have: the bounds against measured figures."""

from __future__ import annotations

import pytest
import torch
from test_health import TINY
from torch import Tensor

from megafp8.config.flags import parse
from megafp8.config.health_case import health_case
from megafp8.config.precision_map import build_recipe
from megafp8.metrics.collector import add_statistics, tracked_tensors
from megafp8.metrics.health import HealthMonitor
from megafp8.metrics.records import QuantizationRecord
from megafp8.metrics.tensor_table import StatisticsTable
from megafp8.quantization.quantize import quantize
from megafp8.recipes.base import LinearRecipe, Operand, ScaleRule

LINEAR = "layers.0.linear_fc1"
RECIPES = {
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "tensorwise-e4m3": "--fp8-format e4m3 --fp8-recipe tensorwise",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1",
    "nvfp4-plain": "--fp4-format e2m1 --no-fp4-2d-weights --no-fp4-hadamard --no-fp4-stochastic-rounding",
}
SHAPE = (256, 256)


def tensors() -> dict[str, Tensor]:
    """Healthy: normal, Laplace, heavy tails, rows and columns of other sizes, outlier channel, activations."""
    torch.manual_seed(1)
    normal, octaves = torch.randn(SHAPE), torch.randn(SHAPE[0]) * 1.5
    outlier = torch.randn(SHAPE)
    outlier[:, 7] *= 64
    return {
        "normal": normal,
        "laplace": torch.distributions.Laplace(0.0, 1.0).sample(SHAPE),
        "student-5": torch.distributions.StudentT(5.0).sample(SHAPE),
        "student-3": torch.distributions.StudentT(3.0).sample(SHAPE),
        "rows": normal * octaves.exp2()[:, None],
        "columns": normal * octaves.exp2(),
        "outlier-channel": outlier,
        "squared-relu": normal.relu().square(),
        "swiglu": torch.nn.functional.silu(normal) * torch.randn(SHAPE),
        "log-normal": normal * torch.randn(SHAPE).exp(),
        "one-hot": torch.full(SHAPE, 0.002).scatter(1, torch.randint(SHAPE[1], (SHAPE[0], 1)), -1.0),
    }


def is_weight_like(name: str) -> bool:
    """Weights have neither an activation's zeros nor the row sizes of activations and gradients."""
    return name in ("normal", "laplace", "student-5", "student-3")


def warnings_of(flags: str, values: Tensor, operands: tuple[Operand, ...]) -> list[str]:
    """The warnings after two statistics steps."""
    config = parse(f"{TINY} {flags} --fp8-log-interval 1".split()).config
    recipe = build_recipe(config.precision)
    assert recipe is not None
    watch = HealthMonitor(health_case(config))
    return [event.detail for step in (1, 2) for event in watch.update(statistics_of(recipe, values, operands, step))]


def statistics_of(recipe: LinearRecipe, values: Tensor, operands: tuple[Operand, ...], step: int) -> QuantizationRecord:
    """Statistics with these values for each operand."""
    entries = [each for operand in operands for each in tracked_tensors(LINEAR, operand, recipe, False)]
    table = StatisticsTable([each.row for each in entries], torch.device("cpu"))
    for each in entries:
        generator = torch.Generator().manual_seed(step) if each.rule.is_stochastic else None
        add_statistics(table, each.row, values, quantize(values, each.rule, generator=generator))
    table.flush()
    host = table.to_host()
    stats = {each.row: host.stats(each.row, each.rule.format.name, 33) for each in entries}
    return QuantizationRecord(
        step=step, recipe=recipe.name, tensors={name: each for name, each in stats.items() if each is not None}
    )


@pytest.mark.parametrize("kind", tensors())
@pytest.mark.parametrize("name", RECIPES)
def test_healthy_tensors_have_no_findings(name: str, kind: str) -> None:
    operands = tuple(Operand) if is_weight_like(kind) else (Operand.INPUT, Operand.GRAD_OUTPUT)
    assert warnings_of(RECIPES[name], tensors()[kind].bfloat16(), operands) == []


def test_four_bit_block_scales_saturate_a_known_fraction() -> None:
    """The margin of the bound: every other block's largest value, by at most 1/17."""
    config = parse(f"{TINY} --fp4-format e2m1 --fp8-log-interval 1".split()).config
    recipe = build_recipe(config.precision)
    assert recipe is not None and recipe.rules[0][2].scale_rule is ScaleRule.TWO_LEVEL
    record = statistics_of(recipe, tensors()["normal"].bfloat16(), (Operand.INPUT,), 1)
    assert record.tensors[f"{LINEAR}.input.row"].saturated_fraction == pytest.approx(0.034, abs=0.004)
    assert record.tensors[f"{LINEAR}.input.row"].underflow_fraction == pytest.approx(0.067, abs=0.005)


def test_blocks_with_vanishing_scales_are_reported() -> None:
    """One value 2^20 times as large as the others: under NVFP4 the scales of the other blocks become zero."""
    values = torch.randn(SHAPE)
    values[0, 0] = 2.0**20
    told = warnings_of(RECIPES["nvfp4-plain"], values.bfloat16(), tuple(Operand))
    assert [each.partition(":")[0] for each in told] == ["gradients underflow", "quantization noise"]
    assert all(f"--precision {LINEAR}" in each for each in told)
    assert warnings_of(RECIPES["mxfp8"], values.bfloat16(), tuple(Operand)) == []


def test_a_tensor_beyond_one_scale_is_reported() -> None:
    """Also in FP8: values in so many octaves that E4M3 flushes most of them to zero."""
    values = torch.randn(SHAPE) * torch.randn(SHAPE).mul(8).exp2()
    told = warnings_of(RECIPES["tensorwise-e4m3"], values.bfloat16(), tuple(Operand))
    assert told and told[0].startswith("gradients underflow: ")
