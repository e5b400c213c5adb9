"""Answers to command lines and numbers of short runs are the recorded ones (`frozen.py`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import forked_runs
from frozen import (
    SHORT_RUNS,
    command_lines,
    current_answers,
    recorded_answers,
    recorded_runs,
    results_of,
    rounding_of_this_machine,
)
from ranks import run_ranks

NAMES = list(command_lines())
PART = 11  # lines that one fork answers


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return recorded_answers()["answers"]


@pytest.mark.parametrize("first", range(0, len(NAMES), PART))
def test_command_lines_have_the_recorded_answers(first: int, recorded: dict[str, Any]) -> None:
    forked_runs.prepare()
    (found,) = run_ranks(1, current_answers, NAMES[first : first + PART])
    for name, answer in found.items():
        assert answer == recorded[name], name


@pytest.mark.long
@pytest.mark.parametrize("name", SHORT_RUNS)
def test_short_runs_have_the_recorded_numbers(name: str, tmp_path: Path) -> None:
    here = recorded_runs().get(rounding_of_this_machine())
    if here is None:
        pytest.skip("no numbers are recorded for the rounding of this machine")
    forked_runs.prepare()
    assert results_of(SHORT_RUNS[name], tmp_path) == here[name]
