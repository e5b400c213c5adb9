"""The spike detector compared with a slow one in exact fractions, and its window."""

from __future__ import annotations

import json
import random
from fractions import Fraction

import pytest

from megafp8.checkpoint.progress import SkipHistory
from megafp8.optimizer.skip_update import SpikeDetector, Window

DETECTOR = SpikeDetector(window=16, sigma=6.0, min_steps=4)


def is_spike(values: list[float], value: float, sigma: float) -> bool:
    """The rule in exact arithmetic: (value - mean)^2 > sigma^2 variance, above the mean."""
    exact = [Fraction(each) for each in values]
    mean = sum(exact) / len(exact)
    variance = sum((each - mean) ** 2 for each in exact) / (len(exact) - 1)
    return Fraction(value) > mean and (Fraction(value) - mean) ** 2 > Fraction(sigma) ** 2 * variance


def curve(seed: int, steps: int = 300) -> list[tuple[float, float]]:
    """Falling losses and noisy norms, some of either far too large."""
    draw = random.Random(seed)
    pairs = []
    for step in range(steps):
        loss, norm = 4 / (1 + step / 30) + draw.gauss(0, 0.05), abs(draw.gauss(1, 0.2))
        kind = draw.randrange(25)
        pairs.append((loss * 3 if kind == 0 else loss, norm * 50 if kind == 1 else norm))
    return pairs


@pytest.mark.parametrize("seed", range(5))
def test_spikes_equal_exact_arithmetic(seed: int) -> None:
    """Every step of a long curve, each series separately. Spikes do not enter the window."""
    window: Window = ()
    found = 0
    for loss, norm in curve(seed):
        recent = window[-16:]
        expected = [
            name
            for name, values, value in (
                ("loss", [loss for loss, _ in recent], loss), ("gradient norm", [norm for _, norm in recent], norm)
            )
            if len(recent) >= 4 and is_spike(values, value, 6.0)
        ]  # fmt: skip
        text = DETECTOR.find_spike(window, loss, norm)
        assert [name for name in ("loss", "gradient norm") if text and f"{name} " in text] == expected
        if text is None:
            window = DETECTOR.after_update(window, loss, norm)
        found += text is not None
        assert len(window) <= 16
    assert found > 5


def test_no_spike_before_the_window_is_filled() -> None:
    window: Window = ()
    for loss in (1.0, 1.1, 0.9):
        assert DETECTOR.find_spike(window, 1e9, 1e9) is None
        window = DETECTOR.after_update(window, loss, 1.0)
    assert DETECTOR.find_spike(window, 1e9, 1e9) is None
    assert DETECTOR.find_spike(DETECTOR.after_update(window, 1.0, 1.0), 1e9, 1.0) is not None


def test_below_the_mean_is_not_a_spike() -> None:
    window = tuple((1.0 + step % 2 / 100, 1.0) for step in range(8))
    assert DETECTOR.find_spike(window, 0.0, 0.0) is None


def test_the_text_has_value_deviation_and_mean() -> None:
    window = tuple((2.0 + step % 2, 1.0 + step % 2) for step in range(8))
    text = DETECTOR.find_spike(window, 10.0, 1.0)
    assert text == "loss 10 is 14.0 standard deviations above the mean 2.5 of the last 8 updates"
    assert " and gradient norm 50 is " in DETECTOR.find_spike(window, 10.0, 50.0)


def test_a_constant_series_has_no_deviation() -> None:
    assert "inf standard deviations" in DETECTOR.find_spike(((1.0, 1.0),) * 8, 1.5, 1.0)
    assert DETECTOR.find_spike(((1.0, 1.0),) * 8, 1.0, 1.0) is None


def test_the_oldest_update_leaves_the_window() -> None:
    window: Window = ()
    for step in range(20):
        window = DETECTOR.after_update(window, float(step), 0.0)
        assert [loss for loss, _ in window] == [float(each) for each in range(max(0, step - 15), step + 1)]


def test_a_resumed_run_decides_the_same() -> None:
    """The window is saved and loaded after every step, as plain values."""
    unbroken: Window = ()
    resumed = SkipHistory()
    for loss, norm in curve(7, steps=60):
        text = DETECTOR.find_spike(unbroken, loss, norm)
        assert DETECTOR.find_spike(resumed.window, loss, norm) == text
        if text is None:
            unbroken = DETECTOR.after_update(unbroken, loss, norm)
            resumed = resumed.after_update(DETECTOR.after_update(resumed.window, loss, norm))
        resumed = SkipHistory.from_plain(json.loads(json.dumps(resumed.plain())))
    assert resumed.window == unbroken
