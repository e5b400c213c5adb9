"""A signal at any time to any process: all ranks stop at one step and save, and the run resumes bitwise."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from faulty_run import EVAL_INTERVAL, STEPS, FaultyRun
from forked_runs import Ended

from megafp8.analysis.runs import load_run
from megafp8.resilience import watchdog
from megafp8.resilience.run_state import RunState, current_state, last_recorded_step, read_run_state

LAYOUT = "dp2"
# When a signal arrives, and the step after which all ranks stop. Odd steps are saved only because of it. After the last
# one, an evaluation remains.
MOMENTS = {
    "rank=0,at=run.start": 1,
    "rank=1,at=load.begin": 2,
    "rank=0,step=3,at=data.wait": 3,
    "rank=1,step=4,at=step.after_update": 4,
    "rank=1,step=6,at=evaluation.begin": 6,
    "rank=0,at=load.begin": 6,
    "rank=1,step=8,at=save.mid_shard": 8,
    "rank=0,step=10,at=save.before_rename": 10,
    "rank=0,step=12,at=save.end": 12,
    "rank=1,step=13,at=step.begin": 13,
    f"rank=0,step={STEPS},at=evaluation.batch": STEPS,
}


def assert_preempted(run: FaultyRun, ended: Ended) -> RunState:
    """All ranks exit with the status, the folder records it, and the completed steps are saved."""
    assert set(ended.statuses) == {75}, ended.report()
    assert ended.num_orphans == 0, ended.report()
    state = current_state(run.folder)
    assert state is not None and (state.state, state.exit_status) == ("preempted", 75), state
    assert state.step == state.saved_step == run.newest, ended.report()
    return state


def assert_done(run: FaultyRun, unbroken: FaultyRun) -> None:
    """It ends like the run that was never stopped: bitwise, with every loss and every evaluation."""
    assert run.fingerprint(STEPS) == unbroken.fingerprint(STEPS)
    assert run.losses() == unbroken.losses()
    evaluations = [
        [(record.step, record.split, record.loss) for record in load_run(each.folder).evals] for each in (run, unbroken)
    ]
    assert evaluations[0] == evaluations[1]
    state = current_state(run.folder)
    assert state is not None and (state.state, state.exit_status, state.step) == ("done", 0, STEPS)


def test_a_signal_at_every_point_saves_and_resumes(tmp_path: Path, cache: Path, unbroken: dict[str, FaultyRun]) -> None:
    """One run that is stopped at each of the points, by each of the signals."""
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    for number, (moment, step) in enumerate(MOMENTS.items()):
        kind, name = (("term", "SIGTERM"), ("usr1", "SIGUSR1"), ("int", "SIGINT"), ("hup", "SIGHUP"))[number % 4]
        state = assert_preempted(run, run.start(f"{kind}:{moment}"))
        assert (state.step, state.reason) == (step, f"{name} to rank {moment[len('rank=')]}"), moment
        left = step % EVAL_INTERVAL == 0 and "save.end" not in moment
        assert state.evaluation_due == (step if left else None), moment
    assert len(list(run.fired.iterdir())) == len(MOMENTS)
    stops = [event.detail for event in load_run(run.folder).events if event.name == "stopped"]
    assert stops[4:7] == [
        "SIGTERM to rank 1, saved at step 6",
        "SIGUSR1 to rank 0, nothing new is saved",  # before the remaining evaluation
        "SIGINT to rank 1, saved at step 8",  # by the save that was running
    ]
    ended = run.start()
    assert set(ended.statuses) == {0}, ended.report()
    assert_done(run, unbroken[LAYOUT])


def test_without_the_handler_a_signal_kills(tmp_path: Path, cache: Path) -> None:
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    ended = run.start("term:rank=1,step=3,at=step.begin", f"--save {run.folder} --no-exit-signal-handler")
    assert ended.statuses == (70, -signal.SIGTERM), ended.report()


def wait_until(is_so: Callable[[], object]) -> None:
    """As long as a small run may take."""
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def send(process_ids: list[int | None], number: int) -> None:
    for process_id in process_ids:
        assert process_id is not None
        os.kill(process_id, number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_to_all_ranks_and_loader_processes(
    number: signal.Signals, tmp_path: Path, cache: Path, unbroken: dict[str, FaultyRun]
) -> None:
    """As at a job's end: the loader processes, which the last step still needs, also receive it. The repeated signal
    from torchrun does not count as a second signal."""
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    flags = f"--save {run.folder} --load {run.folder} --num-workers 2 --log-interval 1"
    with run.started("sleep:rank=1,seconds=0.5,at=step.begin,times=99", flags) as forked:
        wait_until(lambda: last_recorded_step(run.folder) >= 3)
        for process in forked.processes:
            os.killpg(process.pid or 0, number)
        time.sleep(0.2)
        send([process.pid for process in forked.processes], number)
        state = assert_preempted(run, forked.wait(60))
    assert state.reason == f"{number.name} to 2 ranks"
    slow = [event.detail for event in load_run(run.folder).events if event.name == "straggler"]
    assert any(text.startswith("rank 1 needs ") for text in slow), "the rank that sleeps is named, too"
    assert set(run.start(flags=flags).statuses) == {0}
    assert_done(run, unbroken[LAYOUT])


def test_a_rank_without_data_exits_after_the_grace_period(tmp_path: Path, cache: Path) -> None:
    """The previous checkpoint is used, and the stacks show where it was."""
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    flags = f"--save {run.folder} --load {run.folder} --exit-signal-grace-s 3"
    with run.started("sleep:rank=1,seconds=600,step=3,at=data.wait", flags) as forked:
        wait_until(lambda: list(run.fired.glob("*data.wait*")))
        began = time.monotonic()
        send([process.pid for process in forked.processes], signal.SIGTERM)
        ended = forked.wait(60)
    assert time.monotonic() - began < 20, "not the default's 30"
    assert set(ended.statuses) == {75} and ended.num_orphans == 0, ended.report()
    state = current_state(run.folder)
    assert state is not None and state.state == "preempted" and state.saved_step == run.newest == 2
    assert "3 s after a signal still in " in state.reason
    assert "fault_injection.py" in (run.folder / "logs/watchdog/rank1.txt").read_text()


def test_a_second_signal_exits_immediately(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that arrives later than any repetition. The checkpoint that was being written has no final name."""
    monkeypatch.setattr(watchdog, "DUPLICATE_SIGNAL_S", 0.5)
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    flags = f"--save {run.folder} --load {run.folder} --exit-signal-grace-s 60"
    with run.started("sleep:rank=0,seconds=600,step=4,at=save.before_rename", flags) as forked:
        wait_until(lambda: list(run.fired.glob("*before_rename*")))
        for _ in range(2):
            send([process.pid for process in forked.processes], signal.SIGINT)
            time.sleep(watchdog.DUPLICATE_SIGNAL_S + 1.0)
        ended = forked.wait(60)
    assert set(ended.statuses) == {75} and ended.num_orphans == 0, ended.report()
    state = current_state(run.folder)
    assert state is not None and "a second SIGINT" in state.reason
    assert run.newest == 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("to", ["one", "all"])
def test_signals_at_random_times(
    to: str, seed: int, tmp_path: Path, cache: Path, unbroken: dict[str, FaultyRun]
) -> None:
    """The long form."""
    draw = random.Random(f"{to} {seed}")
    run = FaultyRun(LAYOUT, tmp_path / "run", cache)
    flags = f"--save {run.folder} --load {run.folder} --num-workers {seed % 2 * 2}"
    for start in count(1):
        with run.started("", flags) as forked:
            wait_until(lambda start=start: (state := read_run_state(run.folder)) and state.starts == start)
            time.sleep(draw.uniform(0, 2))
            for process in forked.processes if to == "all" else [draw.choice(forked.processes)]:
                if process.is_alive():
                    os.killpg(process.pid or 0, signal.SIGTERM)
            ended = forked.wait(60)
        if set(ended.statuses) == {0}:
            break
        assert_preempted(run, ended)
    assert_done(run, unbroken[LAYOUT])
