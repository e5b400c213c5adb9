"""The search for a micro-batch size: where it starts, what it tries, and what it chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import pytest

from megafp8.config import flags
from megafp8.config.layer_backends import EMULATED
from megafp8.config.micro_batch_sizes import is_auto, possible_sizes, refused_sizes, setting_problems, with_size
from megafp8.resources.micro_batch import (
    HEADING,
    Trial,
    best_size,
    first_size,
    next_size,
    predicted_bytes,
    sizes_to_try,
    table,
    table_row,
)

POWERS = [1, 2, 4, 8, 16, 32, 64]
DIVISORS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]
SHAPE = (
    "--model-preset tiny --vocab-size 1000 --mock-data --tokenizer-type NullTokenizer --seq-length 128 "
    "--train-iters 10 --lr 1e-3 --bf16"
)


def search(sizes: list[int], first: int, time_of: Callable[[int], Optional[float]]) -> tuple[list[int], Optional[int]]:
    """The tried sizes in order, and the chosen one."""
    tried: dict[int, Optional[float]] = {}
    while (size := next_size(sizes, tried, first)) is not None:
        assert size in sizes and size not in tried, "each size is tried once"
        tried[size] = time_of(size)
    return list(tried), best_size(tried)


def up_to(largest: int, time_of: Callable[[int], float] = lambda size: 1 / size) -> Callable[[int], Optional[float]]:
    """Times of a machine with room for this number of sequences."""
    return lambda size: time_of(size) if size <= largest else None


@pytest.mark.parametrize(
    ("sizes", "first", "largest", "order"),
    [
        pytest.param(POWERS, 8, 16, [8, 16, 32], id="doubling up to what does not fit"),
        pytest.param(POWERS, 64, 64, [64, 32], id="all fits"),
        pytest.param(POWERS, 64, 5, [64, 32, 16, 8, 4, 2], id="halving down"),
        pytest.param(DIVISORS, 8, 13, [8, 16, 12], id="between"),
        pytest.param(DIVISORS, 4, 30, [4, 8, 16, 24, 48], id="the next divisor where none doubles"),
        pytest.param(DIVISORS, 1, 3, [1, 2, 4, 3], id="from the smallest"),
        pytest.param([7], 7, 7, [7], id="one size"),
        pytest.param([1, 5, 25], 1, 30, [1, 5, 25], id="far apart"),
        pytest.param(DIVISORS, 48, 0, [48, 24, 12, 6, 3, 1], id="nothing fits"),
    ],
)
def test_the_largest_that_fits_is_found(sizes: list[int], first: int, largest: int, order: list[int]) -> None:
    tried, best = search(sizes, first, up_to(largest))
    assert tried == order
    assert best == max((size for size in sizes if size <= largest), default=None)


@pytest.mark.parametrize("fastest", DIVISORS)
@pytest.mark.parametrize("first", DIVISORS)
def test_the_fastest_is_found_where_speed_has_one_peak(fastest: int, first: int) -> None:
    index = DIVISORS.index(fastest)
    _, best = search(DIVISORS, first, up_to(16, lambda size: 1 + abs(DIVISORS.index(size) - index)))
    assert best == min(fastest, 16)


def test_similar_speeds_give_the_larger_size() -> None:
    assert best_size({4: 10.0, 8: 10.05, 16: 10.2, 32: None}) == 8
    assert best_size({4: None}) is None


def test_predictions_bound_the_search() -> None:
    needed = {1: 50, 2: 80, 4: 140, 8: 260}
    assert first_size(needed, 100) == 2
    assert sizes_to_try(needed, 100) == [1, 2, 4]
    assert (first_size(needed, 10), sizes_to_try(needed, 10)) == (1, [1]), "the smallest is tried in any case"


def test_prediction_grows_with_the_size_and_equals_the_planner() -> None:
    config = flags.parse(f"{SHAPE} --global-batch-size 16 --micro-batch-size auto".split()).config
    small, large = predicted_bytes(config, (1, 16), 1, 1024, EMULATED, 0).values()
    assert 10 * small > large > small
    assert predicted_bytes(config, (1,), 1, 1024, EMULATED, 7) == {1: small + 7}


def test_sizes_divide_the_batch_of_a_rank_and_break_no_rule() -> None:
    def sizes(extra: str, world_size: int) -> list[int]:
        return possible_sizes(flags.parse(f"{SHAPE} --micro-batch-size auto {extra}".split()).config, world_size)

    assert sizes("--global-batch-size 48", 2) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert sizes("--global-batch-size 48 --micro-batch-size-max 5", 2) == [1, 2, 3, 4]
    assert sizes("--global-batch-size 48 --tensor-model-parallel-size 2", 4) == [1, 2, 3, 4, 6, 8, 12, 24]
    virtual = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"
    assert sizes(f"--global-batch-size 12 {virtual}", 2) == [1, 2, 3, 6], "microbatches come in pairs"
    fp8 = "--fp8-format hybrid --fp8-recipe tensorwise --seq-length 8"
    assert sizes(f"--global-batch-size 8 {fp8}", 1) == [2, 4, 8], "a GEMM's rows are multiples of 16"
    assert sizes("--global-batch-size 9", 2) == []


def test_sizes_that_break_a_rule_are_reported() -> None:
    """Otherwise the request would silently narrow the search."""
    fp8 = "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --swiglu --disable-bias-linear --ffn-hidden-size 256"
    requested = f"{SHAPE} --global-batch-size 4 --micro-batch-size auto --seq-length 64 {fp8}"
    config = flags.parse(f"{requested} --swiglu-quantize-fusion".split()).config
    assert possible_sizes(config, 1) == [2, 4] and possible_sizes(flags.parse(requested.split()).config, 1) == [1, 2, 4]
    (line,) = refused_sizes(config, 1)
    assert line.startswith("1 is skipped: --swiglu-quantize-fusion needs multiples of 128 tokens and channels")
    assert refused_sizes(flags.parse(requested.split()).config, 1) == []


def test_problems_of_every_size_are_reported() -> None:
    def problems(extra: str, world_size: int = 1) -> str:
        return "\n".join(setting_problems(flags.parse(f"{SHAPE} {extra}".split()).config, world_size))

    assert problems("--micro-batch-size auto --global-batch-size 8") == ""
    assert "--global-batch-size, which is missing" in problems("--micro-batch-size auto")
    assert "--global-batch-size 9 is not a multiple" in problems("--micro-batch-size auto --global-batch-size 9", 2)
    assert "--skip-train" in problems("--micro-batch-size auto --global-batch-size 8 --skip-train")


def test_a_chosen_size_equals_a_given_one() -> None:
    limit = "--micro-batch-size-memory-limit 3"
    auto = flags.parse(f"{SHAPE} --global-batch-size 8 --micro-batch-size auto {limit}".split()).config
    given = flags.parse(f"{SHAPE} --global-batch-size 8 --micro-batch-size 4".split()).config
    assert is_auto(auto.training) and not is_auto(given.training)
    assert with_size(auto, 4) == given


def test_the_table() -> None:
    trials = [
        Trial(size=8, predicted_bytes=3 * 2**30, note="does not fit: no memory"),
        Trial(size=4, predicted_bytes=2**30, peak_bytes=2**31, ms_per_sample=1.25),
    ]
    lines = table(trials).splitlines()
    assert lines == [HEADING, table_row(trials[1]), table_row(trials[0])]
    assert lines[1].split() == ["4", "1.00", "2.00", "1.25"]
    assert lines[2].endswith("3.00  does not fit: no memory")
