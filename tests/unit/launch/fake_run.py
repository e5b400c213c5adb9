"""A run as launchers see it, without training: it follows a list of ends, one for each start.

    python fake_run.py FOLDER "died:40:47 done:60:60"

Each end is STATE:SAVED_STEP:STEP. In place of a state, `wait` waits for SIGTERM or SIGHUP and is then `preempted`,
`nothing` writes no state, `orphan` leaves a process in its own session that ignores SIGTERM, and is then `died`, and a
number is the exit status of a run that failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from megafp8.resilience.run_state import RECORDS_FILE, RUN_STATE_FILE, RunState, read_run_state
from megafp8.utils.process import current_process


def main(folder: Path, ends: list[str]) -> int:
    before = read_run_state(folder)
    counter = folder / "starts"
    number = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(number + 1))
    state, saved, step = (*ends[min(number, len(ends) - 1)].split(":"), "0", "0")[:3]
    if state == "nothing":
        return 3
    if state == "orphan":
        sleeper = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600"], start_new_session=True)
        (folder / "orphan").write_text(str(sleeper.pid))
    if state == "wait":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGHUP])
        (folder / "waits").touch()
        got = signal.sigtimedwait([signal.SIGTERM, signal.SIGHUP], 20)
        if got is None:  # without a signal: no test waits forever
            return 3
        (folder / "got").write_text(f"{signal.Signals(got.si_signo).name} {os.environ.get('PET_SIGNALS_TO_HANDLE')}")
        state = "preempted"
    status = {"done": 0, "stopped": 0, "preempted": 75}.get(state, int(state) if state.isdigit() else None)
    now = time.time()
    with open(folder / RECORDS_FILE, "a") as stream:
        stream.write(json.dumps({"kind": "step", "step": int(step)}) + "\n")
    content = RunState(
        state="failed" if state.isdigit() else "running" if status is None else state,
        step=int(saved), saved_step=int(saved), exit_status=status, world_size=1, process=current_process(),
        starts=before.starts + 1 if before else 1, started_at=now, first_step_at=now, updated_at=now,
    )  # fmt: skip
    (folder / RUN_STATE_FILE).write_text(json.dumps(content.to_plain()))
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2].split()))
