"""Warnings: other numbers of GPUs, and recipes without a ranking."""

from __future__ import annotations

import pytest

from megafp8.config import flags
from megafp8.device.gpus import GPUS
from megafp8.planning.plan import Plan, factor_text, make_plan, nearby_counts
from megafp8.planning.report import plan_data, plan_text

FEW = "--bf16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --micro-batch-size 1"
"""Layouts that are quick to search."""


def planned(text: str, *, gpu: str, gpus: int) -> Plan:
    return make_plan(flags.parse(f"--model-preset llama3-8b {text}".split()), GPUS[gpu], gpus, ())


@pytest.mark.parametrize(
    ("gpus", "nearby"),
    [
        (509, [504, 508, 512]), (13, [12, 16]), (7, [8]), (1016, [960, 992, 1024]), (40, [32]),
        *((each, []) for each in (1, 2, 8, 16, 24, 64, 512, 640, 16_384)),
    ],
)  # fmt: skip
def test_numbers_that_divide_well_are_not_compared(gpus, nearby) -> None:
    assert nearby_counts(gpus) == nearby


def test_why_a_number_is_hard_to_divide() -> None:
    assert factor_text(509) == "are a prime number, which can only be divided as 1 x 509"
    assert factor_text(1018) == "have the odd factor 509, which few layouts can use"
    assert "odd factor 25," in factor_text(25)


def test_a_prime_number_of_gpus_is_compared_with_its_neighbours() -> None:
    """13 GPUs can only be data-parallel, which needs recompute. 12 can divide the sequences."""
    plan = planned(FEW, gpu="h100", gpus=13)
    (warning,) = plan.warnings
    speeds = {
        gpus: gpus * planned(FEW, gpu="h100", gpus=gpus).search.layouts[0].step.tokens_per_s_per_gpu
        for gpus in (12, 13, 16)
    }
    assert speeds[12] > speeds[13]
    for gpus, speed in speeds.items():
        assert f"{gpus} GPUs" in warning and f"{speed:,.0f}" in warning
    assert "prime number" in warning and warning.endswith("more with fewer GPUs")
    assert warning in plan_text(plan, 1) and plan_data(plan, 1)["remarks"] == [warning]


def test_where_nothing_fits_neighbours_that_fit_are_reported() -> None:
    one = "--tensor-model-parallel-size 1 --context-parallel-size 1 --micro-batch-size 1"
    plan = planned(f"--num-layers 96 {one}", gpu="h100", gpus=13)
    assert not plan.search.layouts and "in total they give 0 tokens/s; 12 GPUs give" in plan.warnings[0]
    assert plan.warnings[0] in plan_text(plan, 1)


def test_a_prime_number_without_cost_gives_no_warning() -> None:
    assert planned(FEW, gpu="b200", gpus=13).warnings == []


@pytest.mark.parametrize(
    ("recipe", "gpu", "is_ranked"),
    [
        *((recipe, "h200", True) for recipe in ("tensorwise", "delayed", "blockwise")),
        *((recipe, "b200", True) for recipe in ("tensorwise", "mxfp8")),
        *((recipe, "b200", False) for recipe in ("delayed", "blockwise")),
    ],
)
def test_recipes_without_a_published_speed_are_not_ranked(recipe, gpu, is_ranked) -> None:
    plan = planned(f"--fp8-recipe {recipe} --tensor-model-parallel-size 1", gpu=gpu, gpus=1)
    assert any(f"{recipe}: not ranked on {gpu}" in warning for warning in plan.warnings) != is_ranked
    assert ("not ranked" in plan_text(plan, 1)) != is_ranked


@pytest.mark.parametrize("gpu", ["b200", "gb200", "b300", "gb300"])
def test_one_scale_per_tensor_is_ranked_before_blocks_on_blackwell(gpu: str) -> None:
    """As in all published rows of dense models (405B 1.08 to 1.10, 70B 1.14, 8B 1.04); the plan says what blocks are
    for."""
    plans = [planned(f"{FEW} --fp8-recipe {recipe}", gpu=gpu, gpus=8) for recipe in ("tensorwise", "mxfp8")]
    of_tensors, of_blocks = (plan.search.layouts[0].step.tokens_per_s_per_gpu for plan in plans)
    assert 1.03 < of_tensors / of_blocks < 1.15
    assert ["blocks are for accuracy" in " ".join(plan.warnings) for plan in plans] == [False, True]


def test_recipes_are_not_ranked_where_another_machines_host_decides() -> None:
    shape = "--seq-length 1024 --micro-batch-size 1 --tensor-model-parallel-size 8"
    text = f"--fp8-recipe mxfp8 {shape} --cuda-graph-impl none"
    *_, warning = planned(text, gpu="b200", gpus=8).warnings
    assert "layers wait for the host" in warning and "not of a b200" in warning
    assert planned(text.replace("mxfp8", "tensorwise"), gpu="h200", gpus=8).warnings == []


def test_assumptions_name_the_constant_of_the_gpu() -> None:
    of_blackwell = plan_text(planned("--bf16", gpu="b200", gpus=1), 1)
    of_hopper = plan_text(planned("--bf16", gpu="h200", gpus=1), 1)
    assert "0.615 (recipes with block scales: fitted to published speeds)" in of_blackwell
    assert "0.566 (recipes with block scales);" in of_hopper and "published" not in of_hopper
