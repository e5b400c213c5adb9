"""Arithmetic of sizes."""

import pytest

from megafp8.utils.integers import round_up


@pytest.mark.parametrize(
    ("value", "multiple", "expected"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16), (50_257, 128, 50_304)]
)
def test_the_smallest_multiple_that_is_not_below(value, multiple, expected):
    assert round_up(value, multiple) == expected
