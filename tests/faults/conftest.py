"""What the fault tests share: every import before the first fork, and runs that nothing hit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import forked_runs
from faulty_run import LAYOUTS, STEPS, FaultyRun


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """Ranks inherit what this process has imported."""
    forked_runs.prepare()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For indices of the data, which all runs here have in common."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, FaultyRun]:
    """By layout, a run that came to its end at the first start. Tests must not write to its folder."""
    runs = {layout: FaultyRun(layout, tmp_path_factory.mktemp("unbroken") / layout, cache) for layout in LAYOUTS}
    for run in runs.values():
        ended = run.start()
        assert set(ended.statuses) == {0}, ended.told()
        assert run.newest == STEPS
    return runs
