"""Experts in one launch per GEMM under the rowwise recipe, against emulated linears: runs, and casts of each step.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/distributed`.
"""

from __future__ import annotations

import interpreter
import pytest
import torch
from interpreter import IS_INTERPRETED
from ranks import run_ranks
from small_run import Curve, build_run, small_config, train
from stacked_experts import EP2, MODEL, stack_experts

interpreter.skip_without_kernels()

from megafp8.kernels import expert_rowwise
from megafp8.kernels.rounding import format_spec
from megafp8.models.grouped_experts import cast_weights
from megafp8.models.grouped_moe import GroupedExperts
from megafp8.recipes.formats import E4M3

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="ranks on a CPU")

ROWWISE = MODEL.partition("--fp8-recipe")[0] + "--fp8-recipe rowwise --global-batch-size 4"


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.make_exact(monkeypatch)


def trained(flags: str, world_size: int, is_stacked: bool) -> Curve:
    """Two steps. Every step casts the weights that the last one wrote."""
    if is_stacked:
        stack_experts()
    run = build_run(small_config("llama", f"{ROWWISE} {flags}", world_size))
    experts = [
        module
        for chunk in run.training_state.chunks
        for module in chunk.modules()
        if isinstance(module, GroupedExperts)
    ]
    assert len(experts) == 2 * is_stacked
    first = train(run, 1)
    before = [(each.linear_fc1.detach().clone(), each.linear_fc2.detach().clone()) for each in experts]
    second = train(run, 1, first_step=2)
    for each, (fc1, fc2) in zip(experts, before, strict=True):
        codes = cast_weights(fc1, fc2, format_spec(E4M3), casts=expert_rowwise)
        assert torch.equal(each.codes.fc1.rows, codes.fc1.rows)
        assert torch.equal(each.codes.fc2.column_scale_inv, codes.fc2.column_scale_inv)
    return Curve(first.losses + second.losses, first.grad_norms + second.grad_norms)


@pytest.mark.parametrize(("world_size", "flags"), [(1, ""), (1, "--fp8-format hybrid"), (2, EP2)])
def test_a_run_is_that_of_emulated_linears(world_size: int, flags: str) -> None:
    stacked, linears = (run_ranks(world_size, trained, flags, world_size, each) for each in (True, False))
    for found, expected in zip(stacked, linears, strict=True):
        assert found.losses == pytest.approx(expected.losses, rel=2e-3)
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=2e-2)
