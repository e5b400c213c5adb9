import numpy as np
import pytest

from megafp8.analysis.plot_comparison import MAX_POINTS, thinned
from megafp8.analysis.seed_statistics import Curve


@pytest.mark.parametrize("num_points", [0, 1, MAX_POINTS, MAX_POINTS + 1, 6200])
def test_a_long_curve_is_drawn_with_fewer_points_and_its_last_one(num_points: int) -> None:
    x = np.arange(num_points, dtype=np.float64)
    curve = thinned(Curve(x=x, mean=x + 1, low=x - 1, high=x + 2))
    assert MAX_POINTS / 2 < len(curve.x) <= MAX_POINTS or len(curve.x) == num_points
    assert curve.x[-1:].tolist() == x[-1:].tolist()
    assert np.array_equal(curve.mean, curve.x + 1) and np.array_equal(curve.low, curve.x - 1)
    assert np.array_equal(curve.high, curve.x + 2)
    assert len(set(np.diff(curve.x))) <= 1, "evenly spaced"
