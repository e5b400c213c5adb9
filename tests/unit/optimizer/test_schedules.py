"""The learning rate of every step, compared with the formulas of the flags."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_run import small_config

from megafp8.checkpoint.load import restore_schedule
from megafp8.config.lr_schedule import schedule_samples
from megafp8.errors import CheckpointError
from megafp8.optimizer.schedules import Schedule, build_schedule, current_learning_rate

BASE = "--train-iters 10 --lr 1.0 --min-lr 0.1 --lr-warmup-iters 2 --global-batch-size 8"
BATCH = 8


def rates(flags: str, num_steps: int = 11, world_size: int = 1) -> list[float]:
    """The learning rate of each step, from the first on."""
    return [rate for rate, _ in walk(flags, num_steps, world_size)]


def walk(flags: str, num_steps: int, world_size: int = 1) -> list[tuple[float, float]]:
    """(learning rate, weight decay) of each step."""
    schedule = built(flags, world_size)
    group, seen = schedule.optimizer.param_groups[0], []
    for _ in range(num_steps):
        seen.append((current_learning_rate(schedule.optimizer), group["weight_decay"]))
        schedule.step(increment=BATCH)
    return seen


def built(flags: str, world_size: int = 1) -> Schedule:
    """The schedule of a run, over one group of parameters."""
    group = {"params": [1], "wd_mult": 1.0, "lr_mult": 1.0, "default_config": True}
    optimizer: Any = SimpleNamespace(param_groups=[group])
    config = small_config("llama", f"{BASE} {flags}", world_size)
    return build_schedule(config.optimizer, schedule_samples(config, world_size), config.checkpoint, optimizer)


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
    """The schedule counts samples. Neither ranks nor micro-batches change it."""
    flags = f"--lr-decay-style {style}"
    assert rates(flags, world_size=2) == rates(flags) == rates(f"{flags} --micro-batch-size 1")
    fraction = f"{flags} --lr-warmup-iters 0 --lr-warmup-fraction 0.2"
    assert rates(fraction) == pytest.approx(rates(flags))


WSD = "--lr-decay-style WSD --lr-wsd-decay-iters 4"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{WSD} --lr-warmup-init 0.2", "--lr-warmup-init: 0 -> 0.2\n"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 2", "--lr-wsd-decay-iters or -samples): 32 -> 16\n"),
        (f"{WSD} --lr-wsd-decay-style linear", "--lr-wsd-decay-style: exponential -> linear\n"),
        ("--lr-decay-style cosine", "--lr-wsd-decay-iters or -samples): 32 -> none\n"),
    ],
)
def test_a_resume_refuses_another_warm_up_and_another_decay_of_wsd(flags: str, words: str) -> None:
    saved, training_state = built(WSD).state_dict(), SimpleNamespace(schedule=built(flags))
    with pytest.raises(CheckpointError, match="a different learning-rate schedule") as caught:
        restore_schedule(Path("iter_1"), training_state, saved)
    assert words in str(caught.value)


@pytest.mark.parametrize("taken", ["saved", "own"])
def test_a_resume_uses_one_of_two_schedules_completely(taken: str) -> None:
    """Within the warm-up, and in the decay of WSD, where megatron-core alone would mix them."""
    saved = f"{WSD} --lr-warmup-init 0.2"
    own = "--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-wsd-decay-style linear"
    flag = {"saved": "use-checkpoint", "own": "override"}[taken]
    expected = rates(saved if taken == "saved" else own)
    for step in (1, 9):
        before, resumed = built(saved), built(f"{own} --load . --{flag}-opt_param-scheduler")
        before.step(increment=step * BATCH)
        restore_schedule(Path("iter_1"), SimpleNamespace(schedule=resumed), before.state_dict())
        assert current_learning_rate(resumed.optimizer) == pytest.approx(expected[step])


def test_a_checkpoint_without_these_fields_resumes() -> None:
    saved, resumed = built(WSD).state_dict(), built(WSD)
    for name in Schedule.EXTRA_KEYS:
        del saved[name]
    restore_schedule(Path("iter_1"), SimpleNamespace(schedule=resumed), saved)
    assert resumed.state_dict() == built(WSD).state_dict()


def test_weight_decay() -> None:
    assert {decay for _, decay in walk("--lr-decay-style constant", 3)} == {0.1}
    rising = "--start-weight-decay 0.0 --end-weight-decay 0.5 --weight-decay-incr-style linear"
    decays = [decay for _, decay in walk(f"{rising} --lr-decay-style constant", 11)]
    assert decays == pytest.approx([0.05 * step for step in range(11)])


def test_rate_of_a_rank_without_ordinary_parameters() -> None:
    optimizer: Any = SimpleNamespace(param_groups=[])
    rate = current_learning_rate(optimizer)
    assert rate != rate
