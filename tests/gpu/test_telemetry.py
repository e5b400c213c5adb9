"""Statistics of Transformer Engine's layers on a GPU: no effect on training, and equal to those of emulated layers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from gpu_runs import FP8_RECIPES, RECIPES, gpu_run
from small_run import statistics_record_of, train

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.operations import count_operations
from megafp8.metrics.records import QuantizationRecord
from megafp8.recipes.base import Gemm, Operand
from megafp8.training.extensions.statistics import StatisticsCollector
from megafp8.training.extensions.statistics_hooks import HookedLinear

STATISTICS = "--fp8-log-interval 1 --fp8-what-if mxfp8,nvfp4"
# More than in tests/distributed/test_statistics_cost.py: a sum may be two kernels, and norms are taken before.
OPERATIONS_PER_TENSOR, OPERATIONS_PER_RECORD, WAITS = 20, 200, 3


def first_record(extra: str, step: int = 1) -> QuantizationRecord:
    with gpu_run(f"{extra} {STATISTICS}") as run:
        if step > 1:
            train(run, step - 1)
        found = statistics_record_of(run, step)
    assert found is not None
    return found


@pytest.mark.parametrize("extra", ["", "--fp8-param-gather"])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_statistics_do_not_change_training(recipe: str, extra: str) -> None:
    losses = []
    for looking in ("", "--fp8-log-interval 2"):
        with gpu_run(f"{RECIPES[recipe]} {extra} {looking}") as run:
            losses.append(train(run, 4).losses)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("fuser", ["", "--use-transformer-engine-op-fuser"])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_transformer_engine_and_emulation_have_equal_statistics(recipe: str, fuser: str) -> None:
    """Same weights and samples, first step: tensors differ by roundings of previous layers, weights are equal."""
    engine = first_record(f"{RECIPES[recipe]} {fuser}")
    emulated = first_record(f"{RECIPES[recipe]} --transformer-impl emulated")
    assert list(engine.tensors) == list(emulated.tensors)
    for name, stats in emulated.tensors.items():
        other = engine.tensors[name]
        assert other.num_values == stats.num_values, name
        if ".weight" in name and recipe != "delayed":
            assert other.exponent_counts == stats.exponent_counts and other.amax == stats.amax, name
        assert other.amax == pytest.approx(stats.amax, rel=0.25), name
        if stats.sqnr_db is not None and recipe != "delayed":
            assert other.sqnr_db == pytest.approx(stats.sqnr_db, abs=1.0), name
    # Signal and noise are differences of two squares that are several times as large: of a microbatch and of the batch.
    for batch in (4, 8):
        squares = [record.gradient_signal + record.gradient_noise / batch for record in (engine, emulated)]
        assert squares[0] == pytest.approx(squares[1], rel=1e-2)
    assert engine.update_to_weight == pytest.approx(emulated.update_to_weight, rel=0.05)


def test_observed_codes_equal_transformer_engine() -> None:
    """Compared with its quantizers on a linear's weight. test_te_statistics.py compares the GEMM operands."""
    with gpu_run(f"{RECIPES['tensorwise']} {STATISTICS}") as run:
        collector = StatisticsCollector(run)
        statistics_record_of(run, 1, collector)
        for linear in collector.linears:
            assert isinstance(linear, HookedLinear)
            quantizer = linear.module.quantizers["scaling_fwd"][1].copy()
            rule = linear.recipe.rule(Operand.WEIGHT, Gemm.FPROP)
            theirs = quantizer(linear.weight.detach())._data.view(torch.uint8)
            ours = linear.codes_of(linear.weight.detach(), Operand.WEIGHT, [rule])[rule].codes.view(torch.uint8)
            assert torch.equal(ours, theirs), linear.name


def test_observed_delayed_scales_equal_those_of_emulation() -> None:
    """Gradients of a few steps fall by octaves, and the history still has larger ones."""
    engine, emulated = (
        first_record(f"{RECIPES['delayed']} {extra}", step=4) for extra in ("", "--transformer-impl emulated")
    )
    ages = {name: stats.staleness_octaves for name, stats in emulated.tensors.items()}
    assert None not in ages.values() and max(abs(age) for age in ages.values()) > 1, ages
    for name, stats in engine.tensors.items():
        assert stats.staleness_octaves == pytest.approx(ages[name], abs=0.75), name


def test_fp8_weights_have_no_quantization_error() -> None:
    found = first_record(f"{RECIPES['tensorwise']} --fp8-param-gather")
    for name, stats in found.tensors.items():
        assert (stats.sqnr_db is None) == name.endswith("weight"), name
        assert stats.num_values > 0


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_statistics_launch_few_kernels_and_rarely_synchronize(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # users do not have them
    with gpu_run(f"{RECIPES[recipe]} --fp8-log-interval 2") as run:
        collector = StatisticsCollector(run)
        for step in (1, 2):  # kernels are compiled
            statistics_record_of(run, step, collector)
        plain, with_statistics = [
            count_operations(lambda step=step: statistics_record_of(run, step, collector)) for step in (3, 4)
        ]
        num_tensors = len(list(collector.plan.tensors()))
    cost = with_statistics - plain
    assert cost.waits <= WAITS, cost
    assert num_tensors < cost.launched < OPERATIONS_PER_TENSOR * num_tensors + OPERATIONS_PER_RECORD, cost
