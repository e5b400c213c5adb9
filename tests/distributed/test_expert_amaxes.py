"""Infinite and saturating amaxes of experts in one launch are counted, named and removed."""

from __future__ import annotations

import pytest
import torch
from megatron.core.utils import unwrap_model
from ranks import run_ranks
from small_run import build_run, small_config
from stacked_experts import EP2, MODEL, stack_experts

from megafp8.config import precision_map
from megafp8.models.grouped_moe import GroupedExperts
from megafp8.nonfinite.experts import ExpertAmaxes
from megafp8.nonfinite.policy import move_grouped_experts
from megafp8.quantization.counters import QUANTIZERS
from megafp8.quantization.delayed_scaling import DelayedScales


def faults(flags: str, world_size: int) -> tuple[list[int], dict[str, list[int]], list[str], float]:
    """Totals, counts of a table, names of infinite amaxes, and a scale after later amaxes. In one microbatch the second
    expert of the second layer has an infinite input of linear_fc2, and its first one a gradient beyond the scale."""
    stack_experts()
    config = small_config("llama", f"{MODEL} {flags}", world_size)
    chunks = unwrap_model(build_run(config).training_state.chunks)
    names = precision_map.linears_with_statistics(config.model, config.precision)
    ExpertAmaxes(names, chunks, torch.device("cpu"))  # of an earlier run in the process
    counts = ExpertAmaxes(names, chunks, torch.device("cpu"))
    layers = [module for module in chunks[0].modules() if isinstance(module, GroupedExperts)]

    def microbatch(amax: float, first_gradient: float, infinite: float) -> None:
        for layer in layers:
            for state in layer.quantizer_state.values():
                state.amax_history[0] = amax
        layers[1].quantizer_state["linear_fc2"].amax_history[0, 0, 1] = infinite
        layers[1].quantizer_state["linear_fc1"].amax_history[0, 2, 0] = first_gradient
        for layer in layers:
            for state in layer.quantizer_state.values():
                layer.exchange.forward_ran(state)
                layer.exchange.backward_ran(state)

    microbatch(448.0, 464.0, torch.inf)
    microbatch(448.0, 448.0, 448.0)
    totals, table = counts.counts().tolist(), counts.find()
    found = {
        f"{names[row]}.{QUANTIZERS[column][0].value}.{QUANTIZERS[column][1].value}": table[row, column].tolist()
        for row, column in table.any(dim=2).nonzero().tolist()
    }
    infinite = counts.clear_infinite_amaxes()
    microbatch(224.0, 224.0, 224.0)
    scale = layers[1].quantizer_state["linear_fc2"].quant_scale[0, 1].item()
    counts.reset()
    assert not counts.counts().any()
    return totals, found, infinite, scale


def scales_of_moved_experts() -> tuple[int, int, float]:
    """How many linears with delayed scaling experts have before and after they are moved to high precision, and a scale
    of the other layer after two microbatches."""
    stack_experts()
    chunks = unwrap_model(build_run(small_config("llama", MODEL, 1)).training_state.chunks)
    experts, others = (module for module in chunks[0].modules() if isinstance(module, GroupedExperts))

    def count() -> int:
        return sum(isinstance(scales, DelayedScales) for scales in experts._scales()[0])

    before = count()
    move_grouped_experts(chunks, ["layers.0.experts.1.linear_fc1"])
    for _ in range(2):
        for state in others.quantizer_state.values():
            state.amax_history[0] = 224.0
            others.exchange.forward_ran(state)
    return before, count(), others.quantizer_state["linear_fc1"].quant_scale[0, 0].item()


def test_moved_experts_have_no_scales_and_others_are_updated() -> None:
    assert run_ranks(1, scales_of_moved_experts) == [(2, 0, 2.0)]


@pytest.mark.parametrize(("world_size", "flags"), [(1, ""), (2, EP2)])
def test_faults_of_experts(world_size: int, flags: str) -> None:
    for rank, (totals, found, infinite, scale) in enumerate(run_ranks(world_size, faults, flags, world_size)):
        first = 2 * rank
        assert totals == [1, 1, 1]
        bad, large = f"layers.1.experts.{first + 1}.linear_fc2", f"layers.1.experts.{first}.linear_fc1"
        assert found == {
            f"{bad}.input.fprop": [1, 0],
            f"{bad}.input.wgrad": [1, 0],
            f"{large}.grad_output.dgrad": [0, 1],
            f"{large}.grad_output.wgrad": [0, 1],
        }
        assert infinite == [f"{bad}.input"]
        assert scale == 1.0, "448 is still in the history"


def test_most_recent_amax_is_not_kept() -> None:
    ((totals, _, infinite, scale),) = run_ranks(1, faults, "--fp8-amax-compute-algo most_recent", 1)
    assert totals == [1, 1, 0] and not infinite and scale == 2.0
