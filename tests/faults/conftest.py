"""Common parts of the fault tests: every import before the first fork, and runs without faults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import forked_runs
from faulty_run import STEPS, FaultyRun


@pytest.fixture(scope="session", autouse=True)
def imported() -> None:
    """Ranks inherit what this process has imported."""
    forked_runs.prepare()


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data indices, which all runs here share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, FaultyRun]:
    """By layout, a run that finished at its first start, when it is asked for. Tests must not write to its folder."""

    class Runs(dict[str, FaultyRun]):
        def __missing__(self, layout: str) -> FaultyRun:
            run = self[layout] = FaultyRun(layout, tmp_path_factory.mktemp("unbroken") / layout, cache)
            ended = run.start()
            assert set(ended.statuses) == {0}, ended.report()
            assert run.newest == STEPS
            return run

    return Runs()


@pytest.fixture(scope="session")
def unbroken_command(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> FaultyRun:
    """The same in layout dp2 on the documents of the command, for runs that start it and do not fork."""
    run = FaultyRun("dp2", tmp_path_factory.mktemp("command") / "run", tmp_path_factory.mktemp("command_cache"))
    with forked_runs.all_mock_documents():
        ended = run.start()
    assert set(ended.statuses) == {0}, ended.report()
    return run
