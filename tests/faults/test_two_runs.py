"""One run a folder, and a run that only crashes comes to an end."""

from __future__ import annotations

import os
import time
from pathlib import Path

from faulty_run import FaultyRun

from megafp8.checkpoint.folder import saved_steps
from megafp8.launch.run_lock import LOCK_FILE
from megafp8.launch.run_state import judge, read_run_state
from megafp8.reports.load import load_run

LAYOUT = "dp2"


def test_a_second_run_is_refused_and_the_first_one_unharmed(tmp_path: Path, cache: Path) -> None:
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    with run.started("sleep:seconds=6,step=2,at=step.begin") as first:
        deadline = time.monotonic() + 30
        while read_run_state(run.folder) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        before = {path: path.read_bytes() for path in run.folder.glob("*.json*")}
        second = run.start()
        assert set(second.statuses) == {73}, second.told()
        refusal = f"RunFolderInUse: --save {run.folder} is in use: process {first.processes[0].pid} on "
        assert refusal in second.output[0] and second.output[1] == "", "one rank says so"
        assert {path: path.read_bytes() for path in before} == before
        ended = first.wait(60)
    assert set(ended.statuses) == {0}, ended.told()
    assert not (run.folder / LOCK_FILE).exists()


def test_the_lock_of_a_killed_run_is_taken_over(tmp_path: Path, cache: Path) -> None:
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    ended = run.start("kill:at=step.begin,step=2", f"--save {run.folder} --load {run.folder} --num-workers 2")
    assert set(ended.statuses) == {-9}
    assert ended.num_orphans == 0, "loader processes end with their rank"
    assert (run.folder / LOCK_FILE).exists()
    died = judge(run.folder)
    assert died is not None and died.state == "died"
    ended = run.start()
    assert set(ended.statuses) == {0}, ended.told()
    assert "which is gone, is taken over" in ended.output[0]
    state = judge(run.folder)
    assert state is not None and (state.starts, state.state) == (2, "done")


def test_a_checkpoint_that_crashes_the_load_is_set_aside(tmp_path: Path, cache: Path) -> None:
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    assert set(run.start("term:rank=0,step=4,at=step.begin").statuses) == {75}
    for _ in range(2):
        assert saved_steps(run.folder) == [2, 4]
        run.fired.joinpath("0000.raise.load.begin.rank1.1").unlink(missing_ok=True)
        assert 70 in run.start("raise:rank=1,at=load.begin").statuses
    ended = run.start("term:rank=0,step=3,at=step.begin")
    assert (run.folder / "iter_0000004.corrupt").is_dir(), ended.told()
    (note,) = (event.detail for event in load_run(run.folder).events if "crashed while they loaded" in event.detail)
    assert "iter_0000004: 2 starts crashed while they loaded it, now iter_0000004.corrupt" in note
    state = judge(run.folder)
    assert state is not None and (state.loads, state.crashes) == (0, 0)


def test_the_only_checkpoint_is_not_set_aside(tmp_path: Path, cache: Path) -> None:
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    assert set(run.start("term:rank=0,step=2,at=step.begin").statuses) == {75}
    for _ in range(3):
        run.fired.joinpath("0000.raise.load.begin.rank1.1").unlink(missing_ok=True)
        assert 70 in run.start("raise:rank=1,at=load.begin").statuses
    assert saved_steps(run.folder) == [2]
    state = judge(run.folder)
    assert state is not None and (state.loading, state.loads, state.crashes) == (2, 3, 2)


def test_a_run_that_only_crashes_stops(tmp_path: Path, cache: Path) -> None:
    """With a status that no supervisor takes for an accident; by hand it can be started again."""
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    flags = f"--save {run.folder} --load {run.folder} --max-crashes 2"
    for start in range(2):
        ended = run.start(f"{'kill' if start else 'raise'}:rank=1,step=1,at=step.begin", flags)
        assert set(ended.statuses) != {74}, ended.told()
        for path in run.fired.iterdir():
            path.unlink()
    ended = run.start(flags=flags)
    assert set(ended.statuses) == {74} and "the last 2 starts of this run crashed" in ended.output[0], ended.told()
    assert set(run.start("term:rank=0,step=1,at=step.begin", flags).statuses) == {75}
    assert os.listdir(run.folder / "iter_0000001")
