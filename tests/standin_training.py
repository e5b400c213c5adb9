"""Stand-in for pretrain_gpt.py: for launchers it is a run, which ends immediately or waits for SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from megafp8.resilience.run_state import RUN_STATE_FILE, RunState
from megafp8.utils.process import current_process


def main(words: list[str]) -> None:
    folder = Path(words[words.index("--save") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    node, rank = os.environ.get("SLURMD_NODENAME", socket.gethostname()), os.environ["RANK"]
    (folder / f"seen{rank}").write_text(json.dumps({"node": node, "words": words}))
    print(f"rank {rank} of {os.environ['WORLD_SIZE']}")
    if "STANDIN_WAITS" in os.environ:
        signal.sigwait([signal.SIGTERM])
    now = time.time()
    state = RunState(
        state="preempted" if "STANDIN_WAITS" in os.environ else "done", step=1, saved_step=1, exit_status=0,
        world_size=1, process=current_process(), started_at=now, updated_at=now,
    )  # fmt: skip
    if rank == "0":
        (folder / RUN_STATE_FILE).write_text(json.dumps(state.to_plain()))


if __name__ == "__main__":
    main(sys.argv[1:])
