"""Contradictions among the flags about non-finite values, beyond one example per rule."""

from __future__ import annotations

import pytest

from megafp8.config import flags
from megafp8.config.rules import declared, skipped_updates
from megafp8.config.rules.base import rules_of

SKIP = "--spike-policy skip --max-skipped-steps 2"
BACK = "--spike-policy rollback --save runs/a --save-interval 10"


def problems(text: str) -> list[str]:
    config = flags.parse(text.split()).config
    rules = (*rules_of(skipped_updates), declared.run_has_what_its_settings_require)
    return [problem for rule in rules for problem in rule(config, 2)]


@pytest.mark.parametrize(
    "text",
    ["", "--max-skipped-steps 3", SKIP, f"{BACK} --load runs/a/", f"{BACK} --load runs/a --max-rollbacks 1"],
)
def test_compatible_settings(text: str) -> None:
    assert problems(text) == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("--spike-sigma 4", "--spike-sigma 4 has no effect without --spike-policy"),
        (f"{SKIP} --spike-skip-batches 10", "has no effect without --spike-policy rollback"),
        (f"{SKIP} --no-check-for-nan-in-loss-and-grad", "--spike-policy skip contradicts"),
        ("--spike-policy rollback --save a --load a", "give --save and --save-interval"),
        (BACK, "give --load runs/a"),
        (f"{BACK} --load runs/b", "of this run only: give --load runs/a"),
        (f"{BACK} --load runs/a --finetune", "without --finetune"),
        (f"{BACK} --load runs/a --no-save-rng", "which --no-save-rng excludes"),
    ],
)
def test_incompatible_settings_are_refused(text: str, part: str) -> None:
    assert any(part in problem for problem in problems(text)), problems(text)
