"""One run per folder: refused while the other one lives, taken over when it is gone."""

from __future__ import annotations

import dataclasses
import errno
import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from megafp8.errors import RunFolderInUse
from megafp8.resilience.run_lock import LOCK_FILE, STALE_S, acquire_run_lock, read_holder, remove_stale_job_lock
from megafp8.utils.process import current_process

ELSEWHERE = dataclasses.replace(current_process(), host="other", place="another boot", pid=17)
GONE = dataclasses.replace(current_process(), started=1)


def leave(folder: Path, holder, age_s: float = 0.0) -> Path:
    """A lock that another run left."""
    path = folder / LOCK_FILE
    path.write_text(json.dumps(dataclasses.asdict(holder)))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_lock_is_held_until_it_is_released(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    lock = acquire_run_lock(folder)
    assert read_holder(lock.path) == current_process()
    with pytest.raises(RunFolderInUse) as refused:
        acquire_run_lock(folder)
    assert refused.value.exit_status == 73
    for part in (f"--save {folder}", f"process {os.getpid()} on {current_process().host}", "last sign of life "):
        assert part in str(refused.value)
    lock.release()
    assert list(folder.iterdir()) == []
    acquire_run_lock(folder)


def test_the_lock_of_a_process_that_is_gone_is_taken_over(tmp_path: Path) -> None:
    leave(tmp_path, GONE)
    assert f"process {GONE.pid} on {GONE.host}, which is gone, is taken over" in (
        acquire_run_lock(tmp_path).taken_over or ""
    )
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]


def test_on_another_machine_only_a_stale_heartbeat_means_death(tmp_path: Path) -> None:
    leave(tmp_path, ELSEWHERE, STALE_S / 2)
    with pytest.raises(RunFolderInUse, match="process 17 on other"):
        acquire_run_lock(tmp_path)
    path = leave(tmp_path, ELSEWHERE, STALE_S * 2)
    assert "not updated its lock for 10 minutes" in (acquire_run_lock(tmp_path).taken_over or "")
    assert read_holder(path) == current_process()


def test_a_heartbeat_in_the_future_expires(tmp_path: Path) -> None:
    """For example after the file server's clock was set back. Age is then measured by its current clock."""
    path = leave(tmp_path, ELSEWHERE, -1e12)
    with pytest.raises(RunFolderInUse, match=r"process 17 on other holds .* \d+ s in the future"):
        acquire_run_lock(tmp_path)
    assert read_holder(path) == ELSEWHERE
    seen = path.stat().st_mtime
    assert seen <= time.time() + 1
    os.utime(path, (seen - STALE_S * 2,) * 2)  # as time passes
    assert "not updated its lock for 10 minutes" in (acquire_run_lock(tmp_path).taken_over or "")


def test_a_holder_whose_clock_is_ahead_keeps_its_lock(tmp_path: Path) -> None:
    path = leave(tmp_path, ELSEWHERE, -1e6)
    for _ in range(3):
        with pytest.raises(RunFolderInUse, match="in the future"):
            acquire_run_lock(tmp_path)
        os.utime(path, (path.stat().st_mtime - STALE_S * 2,) * 2)  # time passes, and the holder renews its heartbeat
        os.utime(path, (time.time() + 1e6,) * 2)


def test_a_killed_takeover_does_not_block_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path, GONE)
    turn = tmp_path / f"{LOCK_FILE}.takeover"
    sleeps = iter(range(100))
    monkeypatch.setattr(time, "sleep", lambda _: next(sleeps))  # ends an endless wait
    for age_s in (1e6, -1e6):
        turn.touch()
        os.utime(turn, (time.time() - age_s,) * 2)
        assert acquire_run_lock(tmp_path).taken_over
        leave(tmp_path, GONE)


def test_a_heartbeat_keeps_the_lock(tmp_path: Path) -> None:
    lock = acquire_run_lock(tmp_path)
    os.utime(lock.path, (1.0, 1.0))
    lock.touch()
    assert time.time() - lock.path.stat().st_mtime < 60


def test_an_unreadable_lock_counts_until_it_is_old(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("")
    with pytest.raises(RunFolderInUse, match="another run holds"):
        acquire_run_lock(tmp_path)
    os.utime(tmp_path / LOCK_FILE, (1.0, 1.0))
    acquire_run_lock(tmp_path)


def test_a_lock_that_another_run_took_over_is_not_released(tmp_path: Path) -> None:
    lock = acquire_run_lock(tmp_path)
    path = leave(tmp_path, ELSEWHERE)
    lock.release()
    assert read_holder(path) == ELSEWHERE


def contend(folder: Path, start, end, winners) -> None:
    start.wait()
    try:
        acquire_run_lock(folder)
        winners.put(os.getpid())
    except RunFolderInUse:
        winners.put(None)
    end.wait()  # a winner that has ended would leave a stale lock


@pytest.mark.parametrize("is_stale", [False, True])
def test_one_of_many_concurrent_starts_gets_the_lock(tmp_path: Path, is_stale: bool) -> None:
    context = multiprocessing.get_context("fork")
    for round_number in range(3):
        folder = tmp_path / str(round_number)
        folder.mkdir()
        if is_stale:
            leave(folder, GONE)
        start, end, winners = context.Event(), context.Event(), context.Queue()
        processes = [context.Process(target=contend, args=(folder, start, end, winners)) for _ in range(6)]
        for process in processes:
            process.start()
        start.set()
        answers = [winners.get(timeout=30) for _ in processes]
        end.set()
        for process in processes:
            process.join()
        assert sum(answer is not None for answer in answers) == 1


def test_only_a_lock_of_the_same_slurm_job_is_ignored(tmp_path: Path) -> None:
    """A dead node holds it. The job's start script knows that the previous start has ended."""
    dead = dataclasses.replace(ELSEWHERE, job="17")
    leave(tmp_path, dead)
    assert not remove_stale_job_lock("18", tmp_path)
    with pytest.raises(RunFolderInUse):
        acquire_run_lock(tmp_path)
    assert remove_stale_job_lock("17", tmp_path)
    acquire_run_lock(tmp_path).release()
    assert not remove_stale_job_lock("17", tmp_path)
    leave(tmp_path, dataclasses.replace(current_process(), job="17"))
    assert not remove_stale_job_lock("17", tmp_path)  # it is alive, here


def test_a_missing_disk_at_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = acquire_run_lock(tmp_path)

    def fail(path: Path, missing_ok: bool) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "unlink", fail)
    lock.release()
