"""Many runs at once, on runs that do not train: their ends are told apart, and a signal reaches those that go on."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from megafp8.launch.batch import OUTPUT_FILE, Batch, Job, Outcome, is_done

RUN = Path(__file__).with_name("fake_run.py")


def job(folder: Path, ends: str) -> Job:
    return Job(name=folder.name, command=(sys.executable, str(RUN), str(folder), ends), folder=folder)


def batch(slots: list[dict[str, str]], told: list[str]) -> Batch:
    return Batch(
        slots, tell_start=lambda job: told.append(f"start {job.name}"),
        tell_end=lambda outcome: told.append(f"end {outcome.job.name}"), tell_steps=lambda steps: None,
    )  # fmt: skip


def run(slots: list[dict[str, str]], jobs: list[Job]) -> dict[str, Outcome]:
    return {outcome.job.name: outcome for outcome in batch(slots, []).run(jobs)}


def test_one_failed_run_takes_no_other_with_it(tmp_path: Path) -> None:
    ends = {"a": "done:60:60", "b": "65:0:7", "c": "nothing", "d": "done:60:60"}
    outcomes = run([{}, {}], [job(tmp_path / name, end) for name, end in ends.items()])
    assert sorted(name for name, outcome in outcomes.items() if outcome.is_done) == ["a", "d"]
    assert "failed at step 0" in outcomes["b"].reason
    assert outcomes["c"].reason == "its command ended with status 3 before the run began"
    assert is_done(tmp_path / "d") and not is_done(tmp_path / "c")


def test_the_end_of_what_a_failed_run_said_is_told_and_all_is_kept(tmp_path: Path) -> None:
    words = "for line in range(40): print('line', line)\nraise SystemExit(2)"
    talker = Job(name="t", command=(sys.executable, "-c", words), folder=tmp_path / "t")
    for _ in range(2):
        tail = run([{}], [talker])["t"].tail.splitlines()
        assert tail[0] == "line 25" and tail[-1] == "line 39"
    assert len((tmp_path / "t" / OUTPUT_FILE).read_text().splitlines()) == 80


def test_an_old_state_is_not_taken_for_that_of_a_new_start(tmp_path: Path) -> None:
    run([{}], [job(tmp_path / "a", "done:60:60")])
    assert is_done(tmp_path / "a")
    again = Job(name="a", command=(sys.executable, "-c", "raise SystemExit(64)"), folder=tmp_path / "a")
    assert "status 64 before the run began" in run([{}], [again])["a"].reason


def test_each_run_has_the_environment_of_its_slot(tmp_path: Path) -> None:
    words = "import json, os, time, pathlib; time.sleep(0.6); print(json.dumps(os.environ['DEVICES']))"
    jobs = [
        Job(name=name, command=(sys.executable, "-c", words), folder=tmp_path / name) for name in ("a", "b", "c", "d")
    ]
    outcomes = run([{"DEVICES": "0"}, {"DEVICES": "1"}], jobs)
    seen = [json.loads(outcomes[name].tail) for name in ("a", "b", "c", "d")]
    assert sorted(seen) == ["0", "0", "1", "1"] and set(seen[:2]) == {"0", "1"}


def test_a_signal_lets_runs_save_and_starts_no_more(tmp_path: Path) -> None:
    told: list[str] = []
    waits = [job(tmp_path / name, "wait:5:5") for name in ("a", "b", "c")]

    def interrupt() -> None:
        deadline = time.monotonic() + 30
        while not all((tmp_path / name / "waits").exists() for name in ("a", "b")) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    both = batch([{}, {}], told)
    outcomes = both.run(waits)
    thread.join()
    assert both.asked == signal.SIGINT
    assert sorted(outcome.job.name for outcome in outcomes) == ["a", "b"]
    assert all(outcome.reason.startswith("preempted at step 5") for outcome in outcomes)
    assert "start c" not in told
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
