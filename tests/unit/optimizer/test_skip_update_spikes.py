"""The spike detector compared with a slow one in exact fractions, and its window."""

from __future__ import annotations

import json
import random
from fractions import Fraction

import pytest

from megafp8.checkpoint.metadata import skip_history
from megafp8.checkpoint.progress import SkipHistory
from megafp8.config.schema import TrainingConfig
from megafp8.optimizer.skip_update import SpikeDetector, Window, extrapolate

DETECTOR = SpikeDetector(window=16, sigma=6.0, min_steps=4, norm_factor=20.0)


def is_loss_spike(values: list[float], value: float, sigma: float) -> bool:
    """The rule in exact arithmetic: above the line, and (value - line)^2 > sigma^2 of its variance."""
    exact, count = [Fraction(each) for each in values], len(values)
    center, mean = Fraction(count - 1, 2), sum(exact) / count
    spread = sum((index - center) ** 2 for index in range(count))
    slope = sum((index - center) * (each - mean) for index, each in enumerate(exact)) / spread
    expected = mean + slope * (count - center)
    scatter = sum((each - mean - slope * (index - center)) ** 2 for index, each in enumerate(exact)) / (count - 2)
    variance = scatter * (1 + Fraction(1, count) + (count - center) ** 2 / spread)
    return Fraction(value) > expected and (Fraction(value) - expected) ** 2 > Fraction(sigma) ** 2 * variance


def is_norm_spike(values: list[float], value: float, factor: float) -> bool:
    exact, middle = sorted(map(Fraction, values)), len(values) // 2
    median = exact[middle] if len(values) % 2 else (exact[middle - 1] + exact[middle]) / 2
    return Fraction(value) > Fraction(factor) * median


def curve(seed: int, steps: int = 300) -> list[tuple[float, float]]:
    """Falling losses and noisy norms, some of either far too large."""
    draw = random.Random(seed)
    pairs = []
    for step in range(steps):
        loss, norm = 4 / (1 + step / 30) + draw.gauss(0, 0.02), abs(draw.gauss(1, 0.2))
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
        losses, norms = [loss for loss, _ in recent], [norm for _, norm in recent]
        expected = []
        if len(recent) >= 4 and is_loss_spike(losses, loss, 6.0):
            expected.append("loss")
        if len(recent) >= 4 and is_norm_spike(norms, norm, 20.0):
            expected.append("gradient norm")
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


def test_below_the_line_is_not_a_spike() -> None:
    window = tuple((1.0 + step % 2 / 100, 1.0) for step in range(8))
    assert DETECTOR.find_spike(window, 0.0, 0.0) is None


def test_a_falling_loss_does_not_hide_a_bad_batch() -> None:
    """The batch is below the mean of the window, but far above the line through it."""
    window = tuple((5.0 - 0.1 * step + step % 2 / 100, 1.0) for step in range(16))
    mean = sum(loss for loss, _ in window) / 16
    assert DETECTOR.find_spike(window, mean - 0.1, 1.0) is not None
    assert DETECTOR.find_spike(window, 3.4, 1.0) is None


def test_bursts_of_the_gradient_norm_are_no_spikes() -> None:
    window = tuple((1.0 + step % 2 / 100, 1.0 + step % 2 / 10) for step in range(16))
    assert DETECTOR.find_spike(window, 1.0, 15.0) is None
    assert DETECTOR.find_spike(window, 1.0, 25.0) is not None


def test_the_default_limits_let_bursts_of_clean_runs_pass_and_find_bad_batches_by_their_loss() -> None:
    """The measured values: clean norms reach 52 times the median, planted bad batches 12 to 60 times, and their losses
    are 8.7 standard deviations above the line or more. A fault of the arithmetic has a norm beyond both."""
    training = TrainingConfig()
    detector = SpikeDetector(
        training.spike_window, training.spike_sigma, training.spike_min_steps, training.spike_norm_factor
    )
    window = tuple((3.0 + 0.1 * (step % 2), 1.3) for step in range(32))
    expected, deviation = extrapolate([loss for loss, _ in window])
    clean = expected + 5.0 * deviation
    assert detector.find_spike(window, clean, 52.0 * 1.3) is None
    assert detector.find_spike(window, clean, 90.0 * 1.3) is None, "room above clean runs"
    assert "loss " in (detector.find_spike(window, expected + 8.7 * deviation, 12.0 * 1.3) or "")
    assert "gradient norm " in (detector.find_spike(window, expected, 1e3 * 1.3) or "")


def test_the_text_has_value_deviation_and_expectation() -> None:
    window = tuple((2.0 + step % 2, 1.0 + step % 2) for step in range(8))
    text = DETECTOR.find_spike(window, 10.0, 1.0)
    assert text == "loss 10 is 10.2 standard deviations above 2.71429, which the last 8 updates lead to"
    assert " and gradient norm 50 is 33.3 times the median 1.5 of " in DETECTOR.find_spike(window, 10.0, 50.0)


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
        resumed = skip_history({"history": json.loads(json.dumps(resumed.plain()))})
    assert resumed.window == unbroken
