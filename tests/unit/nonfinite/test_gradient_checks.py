"""The parts of the finite check that need no ranks. `distributed/test_nonfinite_values.py` tests all of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks

from megafp8.metrics.step_totals import BAD_RANKS, LOSS, STOPPING_RANKS, StepTotals, sum_over_ranks
from megafp8.nonfinite.gradients import (
    BadTensor,
    NonFiniteGradientMonitor,
    NonFiniteReport,
    describe_report,
    find_bad_tensor,
    is_finite,
    loss_and_flags,
    parameters_in_forward_order,
)

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


class Group:
    """The used part of megatron-core's bucket group: buckets, and the start of their reduction."""

    def __init__(self, *gradients: torch.Tensor):
        self.buckets = [SimpleNamespace(grad_data=gradient) for gradient in gradients]
        self.started: list[Any] = []

    def start_grad_sync(self, *args: Any) -> str:
        self.started.append(args)
        return "handle"


def chunk(**parameters: torch.Tensor) -> Any:
    """A model chunk with the gradient in `main_grad`, which is `parameter.gradient` here."""
    named = []
    for name, parameter in parameters.items():
        parameter.main_grad = torch.ones(2)
        named.append((f"module.{name}", parameter))
    return SimpleNamespace(module=SimpleNamespace(named_parameters=lambda: named))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
def test_one_element_is_enough(value: float, dtype: torch.dtype) -> None:
    tensor = torch.ones(1000, dtype=dtype)
    assert is_finite(tensor)
    tensor[517] = value
    assert not is_finite(tensor)


def test_infinities_that_cancel_are_seen() -> None:
    """Their sum is NaN, which is not finite either. A mean of signs would miss them."""
    assert not is_finite(torch.tensor([INF, -INF]))


def test_monitor_checks_when_a_reduction_starts() -> None:
    good, bad = Group(torch.ones(4), torch.ones(4)), Group(torch.ones(4), torch.tensor([0.0, NAN]))
    watch = NonFiniteGradientMonitor([SimpleNamespace(bucket_groups=[good, bad])], CPU)
    assert good.start_grad_sync(1) == "handle"
    assert good.started == [(1,)]
    assert not watch.bad
    bad.start_grad_sync()
    assert bad.started == [()]
    assert watch.bad > 0
    good.start_grad_sync()
    assert watch.bad > 0, "a good bucket does not make up for a bad one"
    watch.reset()
    assert not watch.bad


def test_monitor_reads_the_bucket_at_that_time() -> None:
    gradient = torch.tensor([NAN])
    group = Group(gradient)
    watch = NonFiniteGradientMonitor([SimpleNamespace(bucket_groups=[group])], CPU)
    gradient.zero_()
    group.start_grad_sync()
    assert not watch.bad


def test_loss_is_a_mean_over_tokens() -> None:
    assert StepTotals({LOSS: (12.0, 8.0)}).loss == 1.5
    empty = StepTotals({LOSS: (0.0, 0.0)}).loss
    assert empty != empty, "no token: no loss, and no crash"


def test_ranks_agree() -> None:
    """Rank 0 has (3, 2), rank 1 nothing, rank 2 (5, 4) and a bad gradient, rank 3 a loss that is not finite. Ranks 1
    and 3 received signals."""

    def ask() -> StepTotals:
        rank = torch.distributed.get_rank()
        losses = [torch.tensor([3.0, 2.0]), None, torch.tensor([5.0, 4.0]), torch.tensor([INF, 1.0])]
        bad = torch.tensor(float(rank == 2))
        return sum_over_ranks(loss_and_flags(losses[rank], bad, CPU, is_stopping=rank in (1, 3)), CPU)

    answers = run_ranks(4, ask)
    assert answers == [StepTotals({LOSS: (INF, 7.0), BAD_RANKS: (2.0,), STOPPING_RANKS: (2.0,)})] * 4


def test_any_named_numbers_are_summed() -> None:
    """A new number of a step needs a name only; tensors keep their order, and other numbers are 0."""

    def ask() -> StepTotals:
        numbers = {LOSS: torch.tensor([3.0, 2.0]), "tokens of experts": torch.tensor([[1, 2], [3, 2**53]])}
        return sum_over_ranks(numbers, CPU)

    (first, second) = run_ranks(2, ask)
    assert first == second and first["tokens of experts"] == (2, 4, 6, 2**54)
    assert first.loss == 1.5
    with pytest.raises(KeyError):
        first.number(BAD_RANKS)  # a name that no rank gave


def test_first_bad_tensor() -> None:
    """The first gradient in the order of the backward pass, which spreads to those below it."""
    model = chunk(a=torch.ones(2), b=torch.ones(2), c=torch.ones(2))
    named = dict(model.module.named_parameters())
    assert find_bad_tensor([model]) is None
    named["module.b"].main_grad[0] = INF
    assert find_bad_tensor([model]) == BadTensor("gradient", "b", 0)
    named["module.a"].main_grad[0] = NAN
    assert find_bad_tensor([model]) == BadTensor("gradient", "b", 0), "a comes later in the backward pass"
    named["module.c"][1] = NAN
    assert find_bad_tensor([model]) == BadTensor("weight", "c", 0), "a bad weight explains the gradients"
    named["module.a"][1] = NAN
    assert find_bad_tensor([model]) == BadTensor("weight", "a", 0), "weights in the order of the forward pass"
    assert find_bad_tensor([chunk(a=torch.ones(2)), model]) == BadTensor("weight", "a", 1)


def test_attention_projection_is_ordered_after_its_input() -> None:
    """megatron-core creates it first."""
    attention = ("linear_proj.weight", "linear_qkv.weight", "q_layernorm.weight")
    parts = ("norm", *(f"self_attention.{each}" for each in attention), "mlp")
    layers = [[f"layers.{layer}.{part}" for part in parts] for layer in range(2)]
    names = ["embedding", *layers[0], *layers[1], "output_layer"]
    model = SimpleNamespace(
        module=SimpleNamespace(named_parameters=lambda: [(f"module.{name}", torch.ones(1)) for name in names])
    )
    found = [name for _, name, _ in parameters_in_forward_order([model])]
    assert [name.rpartition("attention.")[2] for name in found[2:5]] == [*attention[1:], attention[0]]
    assert sorted(found) == sorted(names) and [name for name in found if "att" not in name] == [
        name for name in names if "att" not in name
    ]


GRADIENT = BadTensor("gradient", "layers.1.mlp", 0)


def sight(replica: int = 0, stage: int = 0, *, loss: bool = False, tensor: Any = GRADIENT) -> NonFiniteReport:
    return NonFiniteReport(replica, (0 if tensor is None else tensor.chunk, stage), loss, tensor, "none", "samples 0-7")


@pytest.mark.parametrize(
    ("sights", "texts"),
    [
        pytest.param(
            [sight()], ["first bad tensor: gradient of layers.1.mlp, in the order of the backward pass"], id="alone"
        ),
        pytest.param(
            [sight(stage=0), sight(stage=1)],
            ["its bad gradients may follow from those of rank 1", "first bad tensor: gradient of layers.1.mlp"],
            id="the-later-stage-comes-first",
        ),
        pytest.param(
            [sight(stage=0, tensor=GRADIENT._replace(chunk=1)), sight(stage=1)],
            ["first bad tensor: gradient of ", "its bad gradients may follow from those of rank 0"],
            id="the-later-chunk-comes-first",
        ),
        pytest.param(
            [sight(replica=0, stage=0), sight(replica=1, stage=1)],
            ["first bad tensor: gradient of ", "first bad tensor: gradient of "],
            id="replicas-have-their-own",
        ),
        pytest.param(
            [sight(stage=0), sight(stage=1, loss=True)],
            ["its weights are finite, and bad gradients follow from the loss", "loss is not finite; its weights are"],
            id="a-bad-loss-spoils-all-gradients",
        ),
        pytest.param(
            [sight(stage=0, tensor=BadTensor("weight", "a", 0)), sight(stage=1, loss=True)],
            ["first bad tensor: weight of a; ", "loss is not finite; its weights are finite"],
            id="a-bad-weight",
        ),
        pytest.param([sight(loss=True, tensor=None)], ["loss is not finite; first bad tensor: none; "], id="loss"),
    ],
)
def test_findings_of_several_ranks_are_combined(sights: list[NonFiniteReport], texts: list[str]) -> None:
    by_rank = dict(enumerate(sights))
    for each, text in zip(sights, texts, strict=True):
        said = describe_report(each, by_rank, num_chunks=1)
        assert said.startswith(text) and said.endswith("; samples 0-7"), said
