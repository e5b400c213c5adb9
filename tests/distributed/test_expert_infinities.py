"""Infinite values of experts in one launch under current scaling are counted where emulated linears count them.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/distributed`.
"""

from __future__ import annotations

from typing import Any

import interpreter
import pytest
import torch
import torch.distributed as dist
from interpreter import IS_INTERPRETED
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model
from ranks import run_ranks
from small_run import SourceSamples, build_run, small_config
from stacked_experts import EP2, MODEL, stack_experts
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.checkpoint.progress import Progress
from megafp8.config import precision_map
from megafp8.models.grouped_moe import GroupedExperts
from megafp8.quantization.counters import NON_FINITE, QUANTIZERS
from megafp8.training.evaluation import build_batches
from megafp8.training.expert_amaxes import ExpertAmaxes
from megafp8.training.operand_faults import named_counts
from megafp8.training.step import train_step

pytestmark = pytest.mark.skipif(not IS_INTERPRETED, reason="ranks on a CPU")

TENSORWISE = MODEL.partition("--fp8-recipe")[0] + "--fp8-recipe tensorwise --global-batch-size 4"
TENSORS = {"linear_fc1.input", "linear_fc2.weight", "linear_fc2.grad_output"}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter.exact_bf16(monkeypatch)
    interpreter.constants_before_tensors(monkeypatch)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", interpreter.scaled_grouped_mm)


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


def counted(flags: str, world_size: int, is_stacked: bool) -> tuple[list[str], list[int]]:
    """The quantizers of all ranks with non-finite values in a step, and this rank's totals."""
    if is_stacked:
        stack_experts()
    config = small_config("llama", f"{TENSORWISE} {flags}", world_size)
    run = build_run(config)
    chunks, names = (
        unwrap_model(run.trainee.chunks),
        precision_map.linears_with_statistics(config.model, config.precision),
    )
    experts = ExpertAmaxes(names, chunks)
    mixtures = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MoELayer)]
    spoil(mixtures[1])
    batches = build_batches(run, SourceSamples(config.data.seq_length), 0, run.global_batch_size, num_workers=0)
    faults = train_step(run, batches, Progress(0, 0)).operand_faults
    if not is_stacked:
        return sorted(name for name, counts in faults.counts if counts.non_finite), []
    assert not faults.counts, "the linears of attention"
    table = experts.add_to_table(torch.zeros(len(names), len(QUANTIZERS), 2, dtype=torch.int64))
    dist.all_reduce(table)
    assert table[..., NON_FINITE].max() == 1 and not experts.clear_infinite_amaxes()
    totals = experts.add_to(torch.zeros(3, dtype=torch.int64)).tolist()
    experts.reset()
    assert not experts.add_to(torch.zeros(3, dtype=torch.int64)).any()
    return sorted(name for name, _ in named_counts(names, table)), totals


@pytest.mark.parametrize(("world_size", "flags"), [(1, ""), (2, f"{EP2} --moe-dispatch-in-fp8")])
def test_they_are_counted_where_emulated_linears_count_them(world_size: int, flags: str) -> None:
    stacked, linears = (run_ranks(world_size, counted, flags, world_size, each) for each in (True, False))
    names, tensors = stacked[0][0], {name.rpartition(".")[0] for name in stacked[0][0]}
    assert names == linears[0][0]
    assert {name.split(".", 4)[4] for name in tensors} == TENSORS
    assert all(name.startswith("layers.1.experts.") for name in tensors)
    totals = torch.tensor([each for _, each in stacked]).sum(0).tolist()
    assert totals == [len(tensors), 0, 0]
