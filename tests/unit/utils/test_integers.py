"""Arithmetic of sizes and seeds."""

import numpy as np
import pytest

from megafp8.utils.integers import fitting_size, numpy_seed, round_up


@pytest.mark.parametrize(
    ("value", "multiple", "expected"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16), (50_257, 128, 50_304)]
)
def test_the_smallest_multiple_that_is_not_below(value, multiple, expected):
    assert round_up(value, multiple) == expected


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((7,), 7), ((7, 1), [7, 1]), ((2**32 - 1,), 2**32 - 1), ((2**32,), [0, 1]),
        ((2**63 - 1, 2), [2**32 - 1, 2**31 - 1, 2]),
    ],
)  # fmt: skip
def test_a_seed_of_any_size_is_one_for_numpy(numbers, expected):
    assert numpy_seed(*numbers) == expected
    np.random.RandomState(numpy_seed(*numbers))


@pytest.mark.parametrize(
    ("size", "amounts", "fitting"),
    [(8, (12, 3072), 4), (8, (32, 4, 96), 4), (3, (8,), 2), (7, (5,), 5), (6, (32, 16), 2), (8, (7, 5), 1)],
)
def test_a_fitting_size_divides_the_amounts_and_if_it_can_the_size(
    size: int, amounts: tuple[int, ...], fitting: int
) -> None:
    assert fitting_size(size, *amounts) == fitting
