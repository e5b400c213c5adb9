"""The learning rate of every step, by the formulas of the flags."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from small_run import small_config

from megafp8.optim.schedule import build_schedule, current_learning_rate

BASE = "--train-iters 10 --lr 1.0 --min-lr 0.1 --lr-warmup-iters 2"


def rates(flags: str, num_steps: int = 11, world_size: int = 1) -> list[float]:
    """Learning rate that each step uses, from the first on."""
    return [rate for rate, _ in walk(flags, num_steps, world_size)]


def walk(flags: str, num_steps: int, world_size: int = 1) -> list[tuple[float, float]]:
    """(learning rate, weight decay) of each step."""
    config = small_config("llama", f"{BASE} {flags}", world_size)
    group = {"params": [1], "wd_mult": 1.0, "lr_mult": 1.0, "default_config": True}
    optimizer: Any = SimpleNamespace(param_groups=[group])
    schedule = build_schedule(config, optimizer, world_size)
    seen = []
    for _ in range(num_steps):
        seen.append((current_learning_rate(optimizer), group["weight_decay"]))
        schedule.step(increment=config.training.global_batch_size)
    return seen


def test_warmup_is_linear_from_its_start() -> None:
    assert rates("--lr-decay-style constant", 4) == pytest.approx([0.0, 0.5, 1.0, 1.0])
    assert rates("--lr-decay-style constant --lr-warmup-init 0.2", 4) == pytest.approx([0.2, 0.6, 1.0, 1.0])
    assert rates("--lr-decay-style constant --lr-warmup-iters 0", 3) == pytest.approx([1.0, 1.0, 1.0])


def test_linear() -> None:
    expected = [1.0 - 0.9 * (step - 2) / 8 for step in range(2, 11)]
    assert rates("--lr-decay-style linear")[2:] == pytest.approx(expected)


def test_cosine_ends_at_the_minimum_and_stays() -> None:
    expected = [0.1 + 0.45 * (1 + math.cos(math.pi * (step - 2) / 8)) for step in range(2, 11)]
    assert rates("--lr-decay-style cosine")[2:] == pytest.approx(expected)
    assert rates("--lr-decay-style cosine --lr-decay-iters 6")[6:] == pytest.approx([0.1] * 5)


def test_wsd_is_flat_and_then_falls() -> None:
    found = rates("--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style linear")
    assert found[2:7] == pytest.approx([1.0] * 5)
    assert found[7:11] == pytest.approx([0.775, 0.55, 0.325, 0.1])


def test_inverse_square_root() -> None:
    found = rates("--lr-decay-style inverse-square-root")
    assert found[2:] == pytest.approx([max(0.1, math.sqrt(2 / step)) for step in range(2, 11)])


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_the_same_in_samples_and_on_more_ranks(style: str) -> None:
    """The schedule counts samples: neither ranks nor micro-batches move it."""
    flags = f"--lr-decay-style {style}"
    assert rates(flags, world_size=2) == rates(flags) == rates(f"{flags} --micro-batch-size 1")
    fraction = f"{flags} --lr-warmup-iters 0 --lr-warmup-fraction 0.2"
    assert rates(fraction) == pytest.approx(rates(flags))


def test_weight_decay() -> None:
    assert {decay for _, decay in walk("--lr-decay-style constant", 3)} == {0.1}
    rising = "--start-weight-decay 0.0 --end-weight-decay 0.5 --weight-decay-incr-style linear"
    decays = [decay for _, decay in walk(f"{rising} --lr-decay-style constant", 11)]
    assert decays == pytest.approx([0.05 * step for step in range(11)])


def test_rate_of_a_rank_without_ordinary_parameters() -> None:
    optimizer: Any = SimpleNamespace(param_groups=[])
    rate = current_learning_rate(optimizer)
    assert rate != rate
