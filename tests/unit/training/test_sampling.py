"""Which tokens may come next, with which probabilities."""

import math

import pytest
import torch

from megafp8.errors import NumericsError
from megafp8.training.sampling import GREEDY, Sampling, candidates, next_token

# exp of these is 1, 4, 2, 1 : probabilities 1/8, 1/2, 1/4, 1/8.
LOGITS = torch.tensor([0.0, math.log(4), math.log(2), 0.0])


def shares(sampling: Sampling, logits: torch.Tensor = LOGITS) -> dict[int, float]:
    ids, probabilities = candidates(logits, sampling)
    return dict(zip(ids.tolist(), probabilities.tolist(), strict=True))


def test_all_tokens_the_most_probable_first_and_equal_ones_by_id() -> None:
    ids, probabilities = candidates(LOGITS, Sampling())
    assert ids.tolist() == [1, 2, 0, 3]
    assert probabilities.tolist() == pytest.approx([0.5, 0.25, 0.125, 0.125])


def test_temperature_is_a_power_of_the_probabilities() -> None:
    weights = [0.5**2, 0.25**2, 0.125**2, 0.125**2]
    expected = [weight / sum(weights) for weight in weights]
    assert list(shares(Sampling(temperature=0.5)).values()) == pytest.approx(expected)
    assert list(shares(Sampling(temperature=1e6)).values()) == pytest.approx([0.25] * 4, abs=1e-5)


def test_top_k_keeps_exactly_k_and_shares_out_their_sum() -> None:
    assert shares(Sampling(top_k=2)) == pytest.approx({1: 2 / 3, 2: 1 / 3})
    assert shares(Sampling(top_k=3)) == pytest.approx({1: 4 / 7, 2: 2 / 7, 0: 1 / 7})
    assert len(shares(Sampling(top_k=9))) == 4


@pytest.mark.parametrize(
    ("top_p", "selected"),
    [(0.01, [1]), (0.5, [1]), (0.51, [1, 2]), (0.75, [1, 2]), (0.8, [1, 2, 0]), (1.0, [1, 2, 0, 3])],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p, selected) -> None:
    found = shares(Sampling(top_p=top_p))
    assert list(found) == selected
    assert sum(found.values()) == pytest.approx(1)
    assert found[1] == pytest.approx(0.5 / sum([0.5, 0.25, 0.125, 0.125][: len(selected)]))


def test_top_p_applies_after_top_k_and_temperature() -> None:
    # Of the two kept, 2/3 and 1/3, the first reaches 0.6. Of all four it would not.
    assert list(shares(Sampling(top_k=2, top_p=0.6))) == [1]
    assert list(shares(Sampling(top_p=0.6))) == [1, 2]
    # 16, 4, 1, 1 of 22: the first has 0.73.
    assert list(shares(Sampling(temperature=0.5, top_p=0.7))) == [1]


def test_top_p_of_one_keeps_every_token() -> None:
    logits = torch.cat((torch.tensor([30.0]), torch.zeros(50_000)))
    assert len(shares(Sampling(), logits)) == 50_001


def test_draws_follow_the_probabilities() -> None:
    generator = torch.Generator().manual_seed(1)
    draws = [next_token(LOGITS, Sampling(), generator) for _ in range(4000)]
    found = [draws.count(token) / 4000 for token in range(4)]
    # Four standard deviations of a fraction of 1/2: 4 x sqrt(1/4 / 4000).
    assert found == pytest.approx([0.125, 0.5, 0.25, 0.125], abs=0.032)


def test_greedy_selects_the_first_maximum_without_a_draw() -> None:
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    assert next_token(torch.tensor([0.0, 2.0, 2.0]), GREEDY, generator) == 1
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad) -> None:
    with pytest.raises(NumericsError, match="not finite"):
        next_token(torch.tensor([0.0, bad]), GREEDY, torch.Generator())


def test_wrong_values_are_all_named() -> None:
    assert Sampling().problems() == []
    assert GREEDY.problems() == []
    found = Sampling(temperature=0.0, top_k=-1, top_p=1.5).problems()
    assert [text.split()[0] for text in found] == ["--temperature", "--top-k", "--top-p"]
    assert len(Sampling(temperature=math.nan, top_p=math.nan).problems()) == 2
