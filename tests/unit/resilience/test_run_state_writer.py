"""The content of `run_state.json`, and which rank writes the final state."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megafp8.errors import CheckpointError, DataError, OutOfMemory, PeerLost
from megafp8.resilience.run_state import RunState, RunStateWriter, finished_state, first_state, read_run_state
from megafp8.resilience.watchdog import Watchdog
from megafp8.training.pretrain import check_crashes, record_failure


def begin(folder: Path, is_writer: bool = True, **changes: Any) -> RunStateWriter:
    journal = RunStateWriter(folder, dataclasses.replace(first_state(folder, 2, 100), **changes), is_writer)
    journal.write()
    return journal


def read(folder: Path) -> RunState:
    state = read_run_state(folder)
    assert state is not None
    return state


def test_rank_0_writes_and_the_first_rank_to_end_gives_the_reason(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    other = RunStateWriter(tmp_path, writer.state, is_writer=False)
    other.update(step=99)
    other.write()
    assert read(tmp_path).step == 0, "only rank 0 writes during the run"
    writer.update(step=7, saved_step=5)
    writer.write()
    other.end("failed", "rank 1: hangs", 71)
    writer.end("failed", "rank 0: lost a peer", 70)
    writer.write()
    state = read(tmp_path)
    assert (state.state, state.reason, state.exit_status) == ("failed", "rank 1: hangs", 71)
    assert (state.step, state.saved_step) == (7, 5), "as far as rank 0 had written"


def test_the_end_of_another_start_is_ignored(tmp_path: Path) -> None:
    begin(tmp_path).end("done", "", 0)
    journal = begin(tmp_path)
    assert (read(tmp_path).state, read(tmp_path).starts) == ("running", 2)
    journal.end("stopped", "--exit-interval 4", 0)
    assert read(tmp_path).reason == "--exit-interval 4"


def start_again(folder: Path, last_step: int = 200) -> list[RunStateWriter]:
    """The next start of two ranks, as `pretrain.claim_run` does it."""
    first, finished = first_state(folder, 2, last_step), finished_state(folder)
    journals = [RunStateWriter(folder, first, rank == 0, finished) for rank in range(2)]
    for journal in journals:
        journal.begin()
    assert read(folder).state == "running"
    return journals


@pytest.mark.parametrize("refusal", [CheckpointError("another model"), DataError("gone")])
def test_a_refused_start_leaves_a_run_done(tmp_path: Path, refusal: Exception) -> None:
    begin(tmp_path, step=100, saved_step=100).end("done", "", 0)
    done = read(tmp_path)
    writer, other = start_again(tmp_path)
    record_failure(refusal, 1, other)
    assert read(tmp_path) == done
    record_failure(PeerLost("rank 1 has ended"), 0, writer)
    writer.write()
    assert read(tmp_path) == done, "what follows from the refusal is no other word"


@pytest.mark.parametrize(("last_step", "state"), [(100, "done"), (200, "preempted")])
def test_a_signal_keeps_a_finished_run_done(tmp_path: Path, last_step: int, state: str) -> None:
    """For example while a micro-batch size was searched. An unfinished run waits for its next start."""
    begin(tmp_path, step=100, saved_step=100).end("done", "", 0)
    done = read(tmp_path)
    writer, other = start_again(tmp_path, last_step)
    other.end("preempted", "rank 1: 30 s after a signal still in the beginning", 75)
    watchdog = Watchdog()
    watchdog.attach(writer, None, {})
    watchdog.outcome, watchdog.reason = "preempted", "SIGTERM to 2 ranks"
    watchdog.finish()
    assert (read(tmp_path) == done) == (state == "done")
    assert read(tmp_path).state == state


@pytest.mark.parametrize("error", [PeerLost("killed"), OutOfMemory("CUDA"), RuntimeError("a mistake")])
def test_a_start_that_crashes_has_failed(tmp_path: Path, error: Exception) -> None:
    begin(tmp_path).end("done", "", 0)
    record_failure(error, 0, start_again(tmp_path)[0])
    assert (read(tmp_path).state, read(tmp_path).exit_status) == ("failed", 70)


@pytest.mark.parametrize("before", ["done", "stopped"])
def test_a_restarted_or_unfinished_run_fails(tmp_path: Path, before: str) -> None:
    begin(tmp_path).end(before, "", 0)
    watchdog, (writer, _) = Watchdog(), start_again(tmp_path)
    watchdog.attach(writer, None, {})
    if before == "done":
        watchdog.resumed(100, is_own=True)
    record_failure(CheckpointError("the disk is full"), 0, writer)
    assert (read(tmp_path).state, read(tmp_path).exit_status) == ("failed", 74)


def test_a_disk_that_fails_stops_no_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    journal = RunStateWriter(tmp_path / "file" / "folder", first_state(tmp_path, 2, 100), is_writer=True)
    (tmp_path / "file").write_text("")
    journal.write()
    journal.write()
    assert capsys.readouterr().out.count("cannot be written: the folder is gone, a file has its name") == 1
    (tmp_path / "file").unlink()
    journal.update(step=7)
    journal.write()
    assert "can be written again" in capsys.readouterr().out
    assert read(tmp_path / "file" / "folder").step == 7


CRASHED: list[tuple[str, int]] = [("failed", 70), ("failed", 71)]
EXPLAINED = [("failed", 64), ("failed", 66), ("failed", 74), ("preempted", 75), ("done", 0), ("stopped", 0)]


@pytest.mark.parametrize(("state", "status"), CRASHED + EXPLAINED)
def test_consecutive_crashes_are_counted(tmp_path: Path, state: str, status: int) -> None:
    begin(tmp_path, crashes=3, loading=40, loads=1, saved_step=40).end(state, "", status)
    first = first_state(tmp_path, 2, 100)
    counted = (4, 40, 1) if (state, status) in CRASHED else (0, None, 0)
    assert (first.crashes, first.loading, first.loads) == counted
    assert first.saved_step == 40 and first.state == "running" and first.exit_status is None


def test_too_many_crashes_end_the_run_and_reset_the_count(tmp_path: Path) -> None:
    journal = begin(tmp_path, crashes=4)
    check_crashes(journal, 5)
    check_crashes(journal, 0)
    with pytest.raises(CheckpointError, match="the last 4 starts of this run crashed") as stopped:
        check_crashes(journal, 4)
    journal.end("failed", str(stopped.value), stopped.value.exit_status)
    assert first_state(tmp_path, 2, 100).crashes == 0
