"""What the record of the experts' load costs, and what it has in a run with CUDA graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.utils._python_dispatch import TorchDispatchMode

from megafp8.config import flags
from megafp8.metrics.expert_load import LayerLoad
from megafp8.metrics.sinks import Sinks
from megafp8.metrics.timers import StepTimer
from megafp8.training.extensions.expert_load import ExpertLoads

EXPERTS, TOKENS = 8, 64
TINY = (
    "--model-preset tiny-moe --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --train-iters 40 --lr 1e-3 "
    f"--mock-data --tokenizer-type NullTokenizer --vocab-size 500 --bf16 --num-experts {EXPERTS} --moe-router-topk 2"
)


class Layer(MoELayer):
    """A layer of which only the router is there."""

    def __init__(self, number: int):
        torch.nn.Module.__init__(self)
        bias = torch.full((EXPERTS,), 0.1 * number)
        self.router: Any = SimpleNamespace(layer_number=number, load=None, expert_bias=bias)
        self.experts, self.token_dispatcher = torch.nn.Identity(), None


class Operations(TorchDispatchMode):
    """Counts the operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Mixture:
    """A run of a mixture on one of three ranks, each of which has all layers; the extension before its first step."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, num_layers: int, rank: int = 0, graph: bool = False, interval: int = 1
    ):
        self.written: list[Any] = []
        self.reduced: list[tuple[int, ...]] = []
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)
        self.layers = torch.nn.ModuleList(Layer(number) for number in range(1, num_layers + 1))
        config = flags.parse(f"{TINY} --num-layers {num_layers} --log-interval {interval}".split()).config
        run = SimpleNamespace(
            config=config, graph=SimpleNamespace(has_graphs=graph),
            training_state=SimpleNamespace(chunks=[self.layers]), platform=SimpleNamespace(device=torch.device("cpu")),
            rank_position=SimpleNamespace(rank=rank, world_size=3), timer=StepTimer(), parts=[],
        )  # fmt: skip
        self.sinks = Sinks([SimpleNamespace(write=self.written.append, close=lambda: None)])
        self.state: Any = SimpleNamespace(run=run, step=0, first_step=1, total_steps=40, sinks=self.sinks)
        self.extension = ExpertLoads()
        self.extension.open(self.state)

    def all_reduce(self, tensor: torch.Tensor, **_: Any) -> None:
        self.reduced.append(tuple(tensor.shape))
        tensor.mul_(3)

    def pass_forward(self) -> None:
        """One microbatch, of which each token has the experts 0 and 1 + its number modulo 4."""
        numbers = torch.arange(TOKENS)
        chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
        chosen[:, 0], chosen[numbers, 1 + numbers % 4] = True, True
        for layer in self.layers:
            if layer.router.load is not None:
                layer.router.load.add(torch.zeros(TOKENS, EXPERTS), chosen, chosen)

    def step(self, replay: Any = None) -> None:
        self.extension.before_step(self.state)
        (replay or self.pass_forward)()
        self.state.step += 1
        self.extension.after_step(self.state, None)  # type: ignore[arg-type]  # not read

    def loads(self) -> dict[int, dict[str, LayerLoad]]:
        self.sinks.flush()
        return {record.step: record.layers for record in self.written if record.kind == "experts"}


def check(load: Optional[LayerLoad], bias: float) -> None:
    assert load is not None
    assert load.num_assignments == 3 * 2 * TOKENS and load.dropped_fraction == 0 and load.num_idle == 3
    assert load.busiest_expert == 0 and load.max_to_mean == EXPERTS / 2
    assert load.entropy_fraction == pytest.approx(1)
    assert (load.bias_min, load.bias_max) == (bias, bias), "the mean over the ranks is exact"


@pytest.mark.parametrize("num_layers", [2, 24])
def test_a_record_takes_one_reduction_and_one_copy_for_all_layers(
    num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = Mixture(monkeypatch, num_layers)
    mixture.extension.before_step(mixture.state)
    mixture.pass_forward()
    mixture.state.step = 1
    with Operations() as operations:
        mixture.extension.after_step(mixture.state, None)  # type: ignore[arg-type]  # not read
    assert mixture.reduced == [(num_layers, EXPERTS + 8)]
    assert len(operations.names) <= 12, operations.names
    assert mixture.written == [], "made while the next step runs"
    layers = mixture.loads()[1]
    assert list(layers) == [str(number) for number in range(num_layers)]
    for number in range(num_layers):
        check(layers[str(number)], torch.tensor(0.1 * (number + 1)).item())


def test_the_sums_of_a_microbatch_take_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = Mixture(monkeypatch, 1)
    mixture.extension.before_step(mixture.state)
    chosen = torch.ones(TOKENS, EXPERTS, dtype=torch.bool)
    with Operations() as operations:
        mixture.layers[0].router.load.add(torch.zeros(TOKENS, EXPERTS), chosen, chosen)
    assert len([name for name in operations.names if "zeros" not in name]) <= 10, operations.names


def test_other_ranks_make_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = Mixture(monkeypatch, 2, rank=1)
    mixture.step()
    assert mixture.reduced and mixture.loads() == {}


def test_each_record_is_of_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is made when the next step has summed."""
    mixture = Mixture(monkeypatch, 2)
    for _ in range(3):
        mixture.step()
    loads = mixture.loads()
    assert list(loads) == [1, 2, 3] and loads[1] == loads[2] == loads[3]


def test_replays_of_a_cuda_graph_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay runs the kernels of the capture, on the tensors of the capture, and calls no Python."""
    mixture = Mixture(monkeypatch, 2, graph=True, interval=4)
    captured: list[Any] = []

    def capture() -> None:
        captured.extend(layer.router.load for layer in mixture.layers)
        mixture.pass_forward()

    def replay() -> None:
        loads = [layer.router.load for layer in mixture.layers]
        for layer, load in zip(mixture.layers, captured, strict=True):
            layer.router.load = load
        mixture.pass_forward()
        for layer, load in zip(mixture.layers, loads, strict=True):
            layer.router.load = load

    for step in range(1, 9):
        mixture.step(capture if step == 2 else replay if step > 2 else None)
    loads = mixture.loads()
    assert list(loads) == [1, 4, 8]
    for layers in loads.values():
        assert list(layers) == ["0", "1"]
        check(layers["0"], torch.tensor(0.1).item())


def test_steps_that_are_not_logged_collect_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = Mixture(monkeypatch, 2, interval=4)
    mixture.step()
    mixture.extension.before_step(mixture.state)
    assert [layer.router.load for layer in mixture.layers] == [None, None]
