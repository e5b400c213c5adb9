"""Which steps run as a graph, on which data, and when it is captured again, with a simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_device import MICROBATCHES, WARM_UP, Device, Stream, graph_of
from torch import Tensor

from megafp8.checkpoint.progress import Progress
from megafp8.config.schema import RunConfig
from megafp8.errors import NumericsError
from megafp8.models.grouped_moe import GroupedExperts
from megafp8.optimizer.received_bytes import ReceivedBytes
from megafp8.training import cuda_graph
from megafp8.training import step as training_step
from megafp8.training.cuda_graph import StepGraph, StepHooks
from megafp8.training.extensions import rollback


class Trainer:
    """Steps whose losses are the sums of their microbatches, each of one number: 0, 1, 2 and so on."""

    def __init__(self, device: Device, graph: StepGraph):
        self.device, self.graph, self.num_passes = device, graph, 0
        self.batches = ({"tokens": torch.tensor([float(number)])} for number in range(1000))

    def passes(self, batches: Iterator[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        self.num_passes += 1
        loss, taken = torch.zeros(1), [next(batches) for _ in range(MICROBATCHES)]
        self.device.launch(lambda: loss.copy_(sum(batch["tokens"] for batch in taken)))
        return [{"loss": loss}]

    def step(self) -> float:
        (report,) = self.graph.run(self.passes, self.batches, MICROBATCHES)
        return report["loss"].item()

    def evaluate(self) -> float:
        (report,) = self.graph.evaluate(self.passes, self.batches, MICROBATCHES)
        return report["loss"].item()


def test_steps_warm_up_then_one_capture_then_replays(device: Device) -> None:
    trainer = Trainer(device, graph_of())
    for _ in range(WARM_UP):
        trainer.step()
    assert trainer.num_passes == WARM_UP and not device.graphs
    for _ in range(4):
        trainer.step()
    (graph,) = device.graphs
    assert trainer.num_passes == WARM_UP + 1 and graph.num_replays == 4 and len(graph.kernels) == 1


def test_graph_losses_follow_the_data(device: Device) -> None:
    """Numbers 0 to 2, then 3 to 5: none is skipped or repeated, also where the graph starts."""
    trainer = Trainer(device, graph_of())
    assert [trainer.step() for _ in range(6)] == [3.0, 12.0, 21.0, 30.0, 39.0, 48.0]


def test_a_reset_graph_is_captured_again(device: Device) -> None:
    trainer = Trainer(device, graph_of())
    losses = [trainer.step() for _ in range(4)]
    trainer.graph.reset()
    losses += [trainer.step() for _ in range(4)]
    assert losses == [9.0 * number + 3 for number in range(8)]
    assert trainer.num_passes == 2 * (WARM_UP + 1) and [graph.num_replays for graph in device.graphs] == [2, 2]


def test_an_evaluation_has_a_graph_in_the_memory_of_the_steps(device: Device) -> None:
    """Eager before there is one of the steps, and in the first pass, which compiles kernels."""
    trainer = Trainer(device, graph_of())
    losses = [trainer.evaluate(), trainer.evaluate()]
    losses += [trainer.step() for _ in range(WARM_UP + 1)]
    assert trainer.num_passes == 2 + WARM_UP + 1
    losses += [trainer.evaluate(), trainer.evaluate(), trainer.step(), trainer.evaluate()]
    step, evaluation = device.graphs
    assert device.pools == [None, step] and (step.num_replays, evaluation.num_replays) == (2, 3)
    trainer.graph.reset()
    losses += [trainer.evaluate() for _ in range(2)]
    assert len(device.graphs) == 2 and losses == [9.0 * number + 3 for number in range(len(losses))]


def test_an_evaluation_is_warm_before_its_capture(device: Device) -> None:
    trainer = Trainer(device, graph_of())
    for _ in range(WARM_UP + 1):
        trainer.step()
    trainer.evaluate()
    assert len(device.graphs) == 1
    trainer.evaluate()
    assert len(device.graphs) == 2


def test_an_evaluation_is_eager_unless_its_graph_is_asked_for(device: Device) -> None:
    trainer = Trainer(device, graph_of(has_evaluation=False))
    for _ in range(WARM_UP + 1):
        trainer.step()
    for _ in range(3):
        trainer.evaluate()
    assert len(device.graphs) == 1


def test_a_replay_counts_the_bytes_of_its_capture(device: Device) -> None:
    """Also after a reset, and where passes between the replays are launched without the graph."""
    counter = ReceivedBytes()
    graph = StepGraph([], WARM_UP, torch.device("cpu"), has_evaluation=True, counters=[counter])
    trainer = Trainer(device, graph)
    received = {"step": 100, "evaluation": 7}

    def counted(kind: str) -> int:
        def passes(batches: Iterator[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
            counter.received_bytes += received[kind]  # in Python, as what starts a collective
            return Trainer.passes(trainer, batches)

        trainer.passes = passes
        trainer.step() if kind == "step" else trainer.evaluate()
        return counter.take()

    kinds = ["step"] * (WARM_UP + 3) + ["evaluation"] * 4 + ["step"] * 2
    assert [counted(kind) for kind in kinds] == [received[kind] for kind in kinds]
    assert [graph.num_replays for graph in device.graphs] == [5, 3]
    graph.reset()
    received["step"] = 60
    assert [counted("step") for _ in range(WARM_UP + 3)] == [60] * (WARM_UP + 3)


def test_bytes_of_before_a_capture_are_not_of_its_replays(device: Device) -> None:
    """For example of weights that a validation gathered."""
    counter = ReceivedBytes()
    trainer = Trainer(device, StepGraph([], 0, torch.device("cpu"), counters=[counter]))
    counter.received_bytes = 5
    trainer.step()
    trainer.step()
    assert counter.take() == 5


def test_hooks_run_on_the_stream_of_the_captures(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    current = [Stream()]

    @contextmanager
    def within(stream: Any) -> Iterator[None]:
        current.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    trainer = Trainer(device, graph_of())
    with cuda_graph.side_stream():
        hooks = current[-1]
    for _ in range(WARM_UP + 1):
        trainer.step()
    trainer.graph.reset()
    for _ in range(WARM_UP + 1):
        trainer.step()
    assert hooks is not current[0] and device.streams == [hooks, hooks]


def test_weight_codes_are_computed_within_the_graph(device: Device) -> None:
    layer = torch.nn.Linear(1, 1)
    layer._fp8_workspaces = {"weight": torch.zeros(1)}
    experts = GroupedExperts.__new__(GroupedExperts)
    torch.nn.Module.__init__(experts)
    experts.codes = torch.zeros(1)
    trainer = Trainer(device, graph_of(torch.nn.Sequential(layer, experts)))
    for _ in range(WARM_UP):
        trainer.step()
    assert layer._fp8_workspaces and experts.codes is not None
    trainer.step()
    assert not layer._fp8_workspaces and experts.codes is None


def test_a_step_with_hooks_has_a_graph_in_the_memory_of_the_others(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks are attached while kernels are launched or captured: in step 1, which warms up, and in 4, not in 6."""
    trainer, attached = Trainer(device, graph_of()), list[int]()
    run = SimpleNamespace(graph=trainer.graph, training_state=SimpleNamespace(chunks=[]))
    monkeypatch.setattr(training_step, "forward_backward", lambda run, batches, *_, **__: trainer.passes(batches))
    generator, losses = torch.Generator(), []
    hooks = StepHooks(contextmanager(lambda: iter([attached.append(number)])), generator)
    for number in range(8):
        step_hooks = [hooks] if number in (1, 4, 6) else []
        reports = training_step.forward_backward_or_replay(run, trainer.batches, MICROBATCHES, step_hooks=step_hooks)
        losses += [report["loss"].item() for report in reports]
    assert losses == [9.0 * number + 3 for number in range(8)]
    step, with_hooks = device.graphs
    assert attached == [1, 4] and (step.num_replays, with_hooks.num_replays) == (4, 2)
    assert device.pools == [None, step] and (step.random_states, with_hooks.random_states) == ([], [generator])
    run.graph.reset()
    assert [*run.graph.by_hooks] == [()]


def test_a_run_whose_steps_all_have_hooks_has_graphs_of_its_combinations(device: Device) -> None:
    trainer = Trainer(device, graph_of())
    one, other = (StepHooks(nullcontext), StepHooks(lambda: nullcontext()))
    losses = []
    for step_hooks in ([one], [one, other], [one], [one, other], [one], [one]):
        (report,) = trainer.graph.run(trainer.passes, trainer.batches, MICROBATCHES, step_hooks)
        losses.append(report["loss"].item())
    losses += [trainer.step(), trainer.step()]
    assert losses == [9.0 * number + 3 for number in range(8)]
    first, second, step = device.graphs
    assert [graph.num_replays for graph in device.graphs] == [3, 1, 2] and device.pools == [None, first, first]


def test_a_step_may_run_without_its_graph(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(device, graph_of())
    training_state = SimpleNamespace(chunks=[])
    run = SimpleNamespace(graph=trainer.graph, training_state=training_state)
    monkeypatch.setattr(training_step, "forward_backward", lambda run, batches, *_, **__: trainer.passes(batches))
    losses = []
    for number in range(6):
        is_eager = number in (0, 4)
        reports = training_step.forward_backward_or_replay(run, trainer.batches, MICROBATCHES, is_eager)
        losses += [report["loss"].item() for report in reports]
    assert losses == [9.0 * number + 3 for number in range(6)]
    (graph,) = device.graphs
    assert graph.num_replays == 2  # of steps 3 and 5: steps 0 and 4 are eager, 1 and 2 warm up
    assert trainer.num_passes == 2 + WARM_UP + 1


def test_a_stage_that_reads_no_batches_has_a_graph(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    run = SimpleNamespace(graph=graph_of(), training_state=SimpleNamespace(chunks=[]))
    monkeypatch.setattr(training_step, "forward_backward", lambda run, batches, *_, **__: taken.append(batches) or [])
    for _ in range(WARM_UP + 3):
        assert training_step.forward_backward_or_replay(run, None, MICROBATCHES) == []
    assert taken == [None] * (WARM_UP + 1) and device.graphs[0].num_replays == 3


def test_rollback_resets_the_graph_before_tensors_are_replaced(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading(Exception):
        pass

    def load(*_: Any) -> None:
        raise Loading

    trainer = Trainer(device, graph_of())
    for _ in range(4):
        trainer.step()
    run = SimpleNamespace(graph=trainer.graph, config=RunConfig(), training_state=None)
    monkeypatch.setattr(rollback, "finish_param_gather", lambda *_: None)
    monkeypatch.setattr(rollback, "choose_rollback_checkpoint", lambda *_, **__: SimpleNamespace(path="there", step=1))
    monkeypatch.setattr(rollback, "load_checkpoint", load)
    with pytest.raises(Loading):
        rollback.roll_back(run, None, Progress(4, 12), NumericsError("a spike"))
    assert not trainer.graph.is_captured and trainer.graph.steps_left == WARM_UP
