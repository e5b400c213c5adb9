"""The parts of the finite check that need no ranks; `distributed/test_bad_numbers.py` has the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks

from megafp8.optim.finite import GradientWatch, StepTotals, agree, first_bad_tensor, is_finite

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


class Group:
    """What megatron-core's bucket group shows: buckets, and the start of their reduction."""

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
    """Their sum is NaN, and not finite either; a mean of signs would miss them."""
    assert not is_finite(torch.tensor([INF, -INF]))


def test_watch_looks_when_a_reduction_starts_and_starts_it() -> None:
    good, bad = Group(torch.ones(4), torch.ones(4)), Group(torch.ones(4), torch.tensor([0.0, NAN]))
    watch = GradientWatch([SimpleNamespace(bucket_groups=[good, bad])], CPU)
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


def test_watch_sees_what_is_in_the_bucket_at_that_time() -> None:
    gradient = torch.tensor([NAN])
    group = Group(gradient)
    watch = GradientWatch([SimpleNamespace(bucket_groups=[group])], CPU)
    gradient.zero_()
    group.start_grad_sync()
    assert not watch.bad


def test_loss_is_a_mean_over_tokens() -> None:
    assert StepTotals(loss_sum=12.0, num_tokens=8.0, num_bad_ranks=0.0).loss == 1.5
    empty = StepTotals(loss_sum=0.0, num_tokens=0.0, num_bad_ranks=0.0).loss
    assert empty != empty, "no token: no loss, and no crash"


def test_ranks_agree() -> None:
    """Rank 0 holds (3, 2), rank 1 nothing, rank 2 (5, 4) and a bad gradient, rank 3 a loss that is not finite;
    signals came to ranks 1 and 3."""

    def ask() -> StepTotals:
        rank = torch.distributed.get_rank()
        losses = [torch.tensor([3.0, 2.0]), None, torch.tensor([5.0, 4.0]), torch.tensor([INF, 1.0])]
        return agree(losses[rank], torch.tensor(float(rank == 2)), CPU, is_asked=rank in (1, 3))

    answers = run_ranks(4, ask)
    assert answers == [StepTotals(INF, 7.0, 2.0, num_asked_ranks=2.0)] * 4
    assert run_ranks(1, lambda: agree(torch.tensor([3.0, 2.0]), torch.tensor(0.0), CPU)) == [StepTotals(3.0, 2.0, 0.0)]


def test_first_bad_tensor() -> None:
    model = chunk(a=torch.ones(2), b=torch.ones(2), c=torch.ones(2))
    named = dict(model.module.named_parameters())
    assert first_bad_tensor([model]) is None
    named["module.c"].main_grad[0] = NAN
    assert first_bad_tensor([model]) == "gradient of c"
    named["module.b"].main_grad[0] = INF
    assert first_bad_tensor([model]) == "gradient of b", "the first in the model's order"
    named["module.c"][1] = NAN
    assert first_bad_tensor([model]) == "weight of c", "a bad weight explains the gradients"
    assert first_bad_tensor([chunk(a=torch.ones(2)), model]) == "weight of chunk 1 c"
