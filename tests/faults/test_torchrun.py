"""Ranks under a real torchrun, under the supervisor: whichever process is killed, the run finishes by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from faulty_run import STEPS, FaultyRun
from forked_runs import PATIENCE_S

from megafp8.launch.supervisor import RESTARTS_FILE
from megafp8.resilience import fault_injection
from megafp8.resilience.run_state import current_state, last_recorded_step

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = "dp2"


class Supervised:
    """A supervised run under torchrun, in the background."""

    def __init__(self, run: FaultyRun):
        self.run = run
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        flags = f"{run.text(None)} --num-threads 1 --num-workers 1".split()
        command = [sys.executable, "launcher/supervise.py", "--backoff-s", "0", "--", *torchrun, "pretrain_gpt.py"]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            fault_injection.FAULTS_VARIABLE: "sleep:seconds=0.3,at=step.begin,times=9",
            fault_injection.FIRED_VARIABLE: str(run.fired),
        }  # fmt: skip
        self.output = run.folder.with_name("output")
        with open(self.output, "w") as stream:
            self.process = psutil.Popen(
                [*command, *flags], cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT
            )

    def wait_for_step(self, step: int) -> list[psutil.Process]:
        """Wait until a step is recorded; returns torchrun and its ranks."""
        deadline = time.monotonic() + 90
        while last_recorded_step(self.run.folder) < step:
            assert time.monotonic() < deadline and self.process.is_running(), self.output.read_text()
            time.sleep(0.05)
        (torchrun,) = self.process.children()
        return [torchrun, *torchrun.children()]

    def end(self) -> int:
        """The exit status, when no process is left."""
        everybody = self.process.children(recursive=True)
        status = self.process.wait(120)
        _, left = psutil.wait_procs(everybody, timeout=PATIENCE_S)
        assert left == [], "orphans"
        return status

    def ends(self) -> list[str]:
        """The final states of the starts."""
        lines = (self.run.folder / RESTARTS_FILE).read_text().splitlines()
        return [json.loads(line)["state"] for line in lines]


def assert_done(run: FaultyRun, unbroken: FaultyRun) -> None:
    state = current_state(run.folder)
    assert state is not None and state.state == "done"
    assert run.fingerprint(STEPS) == unbroken.fingerprint(STEPS)
    assert run.losses() == unbroken.losses()


def hit_one(supervised: Supervised, victim: int, number: int) -> None:
    """Send a signal to torchrun (0) or to one of its ranks."""
    supervised.wait_for_step(3)[victim].send_signal(number)


TORCHRUN, RANK_1 = 0, 2


@pytest.mark.parametrize(
    ("victim", "number", "ended"),
    [
        pytest.param(TORCHRUN, signal.SIGTERM, "preempted", id="torchrun-term", marks=pytest.mark.slow),
        pytest.param(TORCHRUN, signal.SIGUSR1, "preempted", id="torchrun-usr1", marks=pytest.mark.long),
        pytest.param(TORCHRUN, signal.SIGKILL, "preempted", id="torchrun-kill", marks=pytest.mark.long),
        pytest.param(RANK_1, signal.SIGTERM, "preempted", id="rank-term", marks=pytest.mark.long),
        pytest.param(RANK_1, signal.SIGKILL, "failed", id="rank-kill", marks=pytest.mark.long),
    ],
)
def test_a_supervised_run_finishes_after_a_kill(
    victim: int, number: int, ended: str, tmp_path: Path, cache: Path, unbroken_command: FaultyRun
) -> None:
    supervised = Supervised(FaultyRun(LAYOUT, tmp_path / "run", cache))
    hit_one(supervised, victim, number)
    assert supervised.end() == 0, supervised.output.read_text()
    assert supervised.ends() == [ended, "done"]
    assert_done(supervised.run, unbroken_command)


@pytest.mark.long
def test_a_signal_to_the_supervisor_stops_the_run(tmp_path: Path, cache: Path) -> None:
    supervised = Supervised(FaultyRun(LAYOUT, tmp_path / "run", cache))
    supervised.wait_for_step(3)
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.end() == 75
    assert supervised.ends() == ["preempted"]
    state = current_state(supervised.run.folder)
    assert state is not None and state.saved_step == state.step == supervised.run.newest >= 3
