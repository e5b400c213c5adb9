"""The history of non-finite values in a run's progress."""

from __future__ import annotations

import json

from megafp8.checkpoint.metadata import skip_history
from megafp8.checkpoint.progress import NOT_FINITE, ROLLBACK, SPIKE, SkipHistory, SkippedSamples

WINDOW = ((2.5, 1.0), (2.25, 0.1 + 0.2))


def test_consecutive_skips_are_counted_until_an_update() -> None:
    history = SkipHistory()
    for step in (1, 2):
        history = history.after_skip(SkippedSamples(8 * step, 8 * step + 8, step, NOT_FINITE))
        assert history.num_in_row == step
    updated = history.after_update(WINDOW)
    assert (updated.num_in_row, updated.window, updated.skipped) == (0, WINDOW, history.skipped)


def test_an_update_without_history_changes_nothing() -> None:
    history = SkipHistory()
    assert history.after_update() is history


def test_progress_survives_a_checkpoint() -> None:
    skipped = (SkippedSamples(8, 16, 2, SPIKE), SkippedSamples(24, 64, 7, ROLLBACK))
    history = SkipHistory(skipped, 1, 2, WINDOW)
    assert skip_history({"history": json.loads(json.dumps(history.plain()))}) == history
    overflowed = history.after_overflow()
    assert skip_history({"history": json.loads(json.dumps(overflowed.plain()))}).num_overflows == 1
    older = {name: value for name, value in history.plain().items() if name != "num_overflows"}
    assert skip_history({"history": older}) == history


def test_summary() -> None:
    assert SkipHistory().summary() == ""
    skipped = (SkippedSamples(8, 16, 2, SPIKE), SkippedSamples(24, 64, 7, ROLLBACK), SkippedSamples(80, 88, 9, SPIKE))
    overflows = "2 steps had no update because gradients overflowed at their loss scale"
    assert SkipHistory(num_overflows=2).summary() == overflows
    both = SkipHistory(skipped[:1], num_overflows=2).summary()
    assert both == f"8 samples were consumed without an update (8 spike): 8-15; {overflows}"
    assert SkipHistory(skipped).summary() == (
        "56 samples were consumed without an update (16 spike, 40 rollback): 8-15, 24-63, 80-87"
    )
