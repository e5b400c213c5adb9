"""Random numbers in CUDA graphs are those of launched steps, with a simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from megatron.core import tensor_parallel
from simulated_device import MICROBATCHES, Device, graph_of
from torch import Tensor

from megafp8.checkpoint import state_dict
from megafp8.quantization.nvfp4 import RoundingNoise
from megafp8.training.cuda_graph import StepHooks


def test_random_states_are_not_swapped_during_a_capture(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(*_: Any, **__: Any) -> None:
        raise AssertionError("states cannot be exchanged now")

    tracker = tensor_parallel.get_cuda_rng_tracker()
    monkeypatch.setattr(type(tracker), "fork", exchange)
    for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
        monkeypatch.setattr(f"megatron.core.tensor_parallel.random.{name}", exchange)
    graph = graph_of()

    def passes(batches: Optional[Iterator[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
        assert batches is None  # a stage that reads none
        with tracker.fork("dropout"):
            inputs = torch.ones(3, requires_grad=True)
            tensor_parallel.checkpoint(torch.square, False, inputs).sum().backward()
            assert torch.equal(inputs.grad, 2 * torch.ones(3))
            return []

    graph.steps_left = 0
    graph.run(passes, None, 0)
    with pytest.raises(AssertionError, match="states"):
        tracker.fork()
    with pytest.raises(AssertionError, match="states"):
        tensor_parallel.checkpoint(torch.square, False, torch.ones(1, requires_grad=True))


def test_a_graph_advances_the_random_states_of_dropout(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the states are generators, a capture switches between them as a launched step does."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    generator, forked = torch.Generator(), list[str]()
    monkeypatch.setattr(tracker, "use_cudagraphable_rng", True)
    monkeypatch.setattr(tracker, "states_", {"dropout": generator})
    monkeypatch.setattr(type(tracker), "fork", lambda self, name: nullcontext(forked.append(name)))

    def passes(batches: Optional[Iterator[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
        with tracker.fork("dropout"):
            return []

    graph = graph_of()
    graph.steps_left = 0
    graph.run(passes, None, 0)
    assert forked == ["dropout"] and device.graphs[0].random_states == [generator]


class CudaGenerator:
    """A generator on the simulated device."""

    def __init__(self, _: Any):
        self.seed: Optional[int] = None

    def manual_seed(self, seed: int) -> CudaGenerator:
        self.seed = seed
        return self


@pytest.mark.parametrize(("moved", "evaluation_draws"), [((), 0), ((5,), 0), ((9,), 0), ((9,), 1)])
def test_replays_round_with_the_random_numbers_of_launched_steps(
    device: Device, monkeypatch: pytest.MonkeyPatch, moved: tuple[int, ...], evaluation_draws: int
) -> None:
    """Also around validations, launched steps, steps with hooks, and a linear that quantizes no more from a step on."""
    monkeypatch.setattr(torch, "Generator", CudaGenerator)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.captured is not None)
    hooks = StepHooks(nullcontext)

    def drawn(has_graph: bool) -> tuple[list[tuple[str, Optional[int]]], list[int]]:
        seeds, noises = [], [RoundingNoise(name) for name in ("first", "second")]
        quantizing, graph = list(noises), graph_of(torch.nn.ModuleList(noises))

        def passes(batches: Any, is_step: bool = True) -> list[dict[str, Tensor]]:
            for noise in noises:
                noise.start_step()
            for noise in (MICROBATCHES if is_step else evaluation_draws) * quantizing:
                generator = noise.next_generator(SimpleNamespace(type="cuda"))
                device.launch(lambda noise=noise, generator=generator: seeds.append((noise.name, generator.seed)))
            return []

        for number in range(12):
            if number in moved:
                quantizing.pop()
                graph.reset()
            if not has_graph or number == 7:
                passes(None)
            elif number in (1, 4, 6, 8, 10):
                graph.run(passes, None, MICROBATCHES, [hooks])
            else:
                graph.run(passes, None, MICROBATCHES)
            graph.evaluate(lambda batches: passes(batches, is_step=False), None, MICROBATCHES)
        return seeds, [noise.num_draws.item() for noise in noises]

    launched, replayed = drawn(False), drawn(True)
    assert replayed == launched and len(set(launched[0])) == len(launched[0]) == sum(launched[1])
    assert all(len(graph.random_states) == 2 * MICROBATCHES for graph in device.graphs)


def test_generators_of_dropout_are_saved_and_restored_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint has tensors, which also a run without a graph loads; a graph keeps its generators."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    generator = torch.Generator().manual_seed(7)
    monkeypatch.setattr(tracker, "use_cudagraphable_rng", True)
    monkeypatch.setattr(tracker, "states_", {"dropout": generator})
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)
    monkeypatch.setattr(state_dict, "parallel_layout", lambda: (1, 1, 1))
    for axis in ("pipeline_model_parallel", "tensor_model_parallel", "data_parallel"):
        monkeypatch.setattr(state_dict.parallel_state, f"get_{axis}_rank", lambda **_: 0)
    saved = state_dict.rng_state()
    assert torch.equal(saved["tracker"]["dropout"], torch.Generator().manual_seed(7).get_state())
    drawn = torch.rand(3, generator=generator)
    state_dict.restore_rng_state(saved)
    assert tracker.get_states()["dropout"] is generator
    assert torch.equal(torch.rand(3, generator=generator), drawn)
