"""Infinite values of experts in one launch under current scaling are counted where emulated linears count them.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/distributed`.
"""

from __future__ import annotations

from typing import Any

import interpreter
import pytest
import torch
from interpreter import IS_INTERPRETED
from megatron.core.transformer.moe.moe_layer import MoELayer
from ranks import run_ranks
from small_run import SourceSamples, build_run, small_config
from stacked_experts import EP2, MODEL, stack_experts
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.checkpoint.progress import Progress
from megafp8.metrics.step_totals import OPERAND_COUNTS
from megafp8.models.grouped_moe import GroupedExperts
from megafp8.training.evaluation import build_batches
from megafp8.training.step import train_step

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="ranks on a CPU")

FLAGS = MODEL.partition("--fp8-recipe")[0] + "--global-batch-size 4"
TENSORS = {"linear_fc1.input", "linear_fc2.weight", "linear_fc2.grad_output"}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.make_exact(monkeypatch)


def infinite(tensor: Tensor) -> Tensor:
    spoiled = tensor.clone()
    spoiled.view(-1)[3] = -torch.inf
    return spoiled


def spoil(mixture: MoELayer) -> None:
    """Make a number of the tokens, of a weight and of the output gradient infinite, in every microbatch. Codes
    saturate: what follows is finite."""
    experts, preprocess = mixture.experts, mixture.preprocess
    is_stacked = isinstance(experts, GroupedExperts)
    weight = experts.linear_fc2[1] if is_stacked else experts.local_experts[1].linear_fc2.weight
    weight.data[0, 3] = torch.inf
    mixture.preprocess = lambda tokens, *others: preprocess(infinite(tokens), *others)

    def spoil_gradient(_: torch.nn.Module, inputs: Any, outputs: tuple[Tensor, Any]) -> None:
        outputs[0].register_hook(infinite)

    mixture.register_forward_hook(spoil_gradient)


def counted(flags: str, world_size: int, is_stacked: bool) -> tuple[list[str], float]:
    """The quantizers of all ranks with non-finite values in a step, and the number of values, of stacked experts that
    of tensors. A later step counts from 0."""
    if is_stacked:
        stack_experts()
    config = small_config("llama", f"{FLAGS} {flags}", world_size)
    run = build_run(config)
    modules = [module for chunk in run.training_state.chunks for module in chunk.modules()]
    spoil([module for module in modules if isinstance(module, MoELayer)][1])
    batches = build_batches(run, SourceSamples(config.data.seq_length), 0, run.global_batch_size, num_workers=0)
    nonfinite = train_step(run, batches, Progress(0, 0)).nonfinite_operands
    assert not nonfinite.infinite_amaxes, "no recipe here has a history"
    run.bad_steps.operands.reset()
    assert not run.bad_steps.operands.counts()[OPERAND_COUNTS].any()
    return sorted(name for name, counts in nonfinite.counts if counts.non_finite), nonfinite.num_non_finite


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, "--fp8-recipe tensorwise"),
        (2, f"--fp8-recipe tensorwise {EP2} --moe-dispatch-in-fp8"),
        (1, "--fp8-recipe rowwise"),
    ],
)
def test_they_are_counted_where_emulated_linears_count_them(world_size: int, flags: str) -> None:
    (names, total), (expected, _) = (
        run_ranks(world_size, counted, flags, world_size, each)[0] for each in (True, False)
    )
    tensors = {name.rpartition(".")[0] for name in names}
    assert names == expected
    assert {name.split(".", 4)[4] for name in tensors} == TENSORS
    assert all(name.startswith("layers.1.experts.") for name in tensors)
    assert total == len(tensors)
