"""Two starts in one folder, and runs that crash repeatedly."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from faulty_run import FaultyRun
from forked_runs import run_forked

from megafp8.analysis.runs import is_unfinished, load_run
from megafp8.checkpoint.directory import complete_steps
from megafp8.resilience.run_lock import LOCK_FILE
from megafp8.resilience.run_state import current_state
from megafp8.utils.process import STOPPED_STATE, read_proc_stat

LAYOUT = "dp2"


def test_a_second_run_is_refused_and_the_first_one_unharmed(tmp_path: Path, cache: Path) -> None:
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    with run.started("stop:step=2,at=step.begin") as first:
        pids = [process.pid for process in first.processes]
        while any(read_proc_stat(pid)[0] != STOPPED_STATE for pid in pids):
            assert not first.poll(0.05), first.output(0)
        before = {path: path.read_bytes() for path in run.folder.glob("*.json*")}
        second = run.start()
        assert set(second.statuses) == {73}, second.report()
        refusal = f"RunFolderInUse: --save {run.folder} is in use: process {pids[0]} on "
        assert refusal in second.output[0] and second.output[1] == "", "one rank says so"
        assert {path: path.read_bytes() for path in before} == before
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        ended = first.wait(60)
    assert set(ended.statuses) == {0}, ended.report()
    assert not (run.folder / LOCK_FILE).exists()


def test_the_lock_of_a_killed_run_is_taken_over(tmp_path: Path, cache: Path) -> None:
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    ended = run.start("kill:at=step.begin,step=2", f"--save {run.folder} --load {run.folder} --num-workers 2")
    assert set(ended.statuses) == {-9}
    assert ended.num_orphans == 0, "loader processes end with their rank"
    assert (run.folder / LOCK_FILE).exists()
    died = current_state(run.folder)
    assert died is not None and died.state == "died"
    ended = run.start()
    assert set(ended.statuses) == {0}, ended.report()
    assert "which is gone, is taken over" in ended.output[0]
    state = current_state(run.folder)
    assert state is not None and (state.starts, state.state) == (2, "done")


def test_a_finished_run_stays_done_after_a_refused_start(tmp_path: Path, cache: Path) -> None:
    """Refused here because --load is missing. With a changed state, a comparison would exclude the run."""
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    command = f"{run.text(f'--save {run.folder}')} --train-iters 3 --num-workers 0"
    first = run_forked(1, command)
    assert first.statuses == (0,), first.report()
    before = {path: path.read_bytes() for path in run.folder.glob("*.json*")}
    second = run_forked(1, command)
    assert second.statuses == (74,) and "has a checkpoint of step 3" in second.output[0], second.report()
    assert {path: path.read_bytes() for path in run.folder.glob("*.json*")} == before
    assert not is_unfinished(run.folder)


def start_alone(run: FaultyRun, plan: str = "", flags: str = "") -> tuple[int, str]:
    """Start it on one rank without recorded faults; returns status and output."""
    shutil.rmtree(run.fired, ignore_errors=True)
    ended = run_forked(1, f"{run.text(None)} {flags}", plan, run.fired)
    return ended.statuses[0], ended.output[0]


def test_a_checkpoint_that_crashes_the_load_is_set_aside(tmp_path: Path, cache: Path) -> None:
    """Unless it is the only one."""
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    assert start_alone(run, "term:step=2,at=step.begin")[0] == 75
    for newest in (2, 4):
        for _ in range(2):
            assert max(complete_steps(run.folder)) == newest
            assert start_alone(run, "raise:at=load.begin")[0] == 70
        state = current_state(run.folder)
        assert state is not None and (state.loading, state.loads, state.crashes) == (newest, 2, 1)
        assert start_alone(run, f"term:step={4 if newest == 2 else 3},at=step.begin")[0] == 75
    assert complete_steps(run.folder) == [2, 3] and (run.folder / "iter_0000004.corrupt").is_dir()
    (note,) = (event.detail for event in load_run(run.folder).events if "crashed while loading" in event.detail)
    assert "iter_0000004: 2 starts crashed while loading it; renamed to iter_0000004.corrupt" in note


def test_a_run_that_keeps_crashing_stops(tmp_path: Path, cache: Path) -> None:
    """With a status that the supervisor does not retry. A user can start it again."""
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    assert start_alone(run, "raise:at=run.start", "--max-crashes 1")[0] == 70
    status, output = start_alone(run, "", "--max-crashes 1")
    assert status == 74 and "the last 1 starts of this run crashed" in output
    assert start_alone(run, "term:step=1,at=step.begin", "--max-crashes 1")[0] == 75
