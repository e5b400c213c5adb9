"""A study's runs as processes of this machine, some at a time, each with GPUs of its own where there are any."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Optional

from megafp8.errors import INTERNAL, PREEMPTED, ConfigError, RunFolderInUse
from megafp8.launch.batch import OUTPUT_FILE, start_run
from megafp8.launch.run_state import RunState
from megafp8.studies.progress import DONE, STOPPED, is_due, progress_of
from megafp8.studies.runs import StudyRun, labels_text

LOOK_S = 0.2


def command_of(run: StudyRun, script: Path) -> list[str]:
    """The command that trains a run on this machine."""
    python = [sys.executable]
    if run.world_size > 1:
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.world_size)]
    return [*python, str(script), *run.flags]


def visible_gpus() -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES may name on this machine; empty without GPUs."""
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        parts = [part.strip() for part in chosen.split(",") if part.strip()]
        return tuple(itertools.takewhile(lambda part: not part.startswith("-"), parts))  # as CUDA: -1 ends the list
    if shutil.which("nvidia-smi") is None:
        return ()
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return tuple(str(number) for number, _ in enumerate(re.findall(r"^GPU ", listed, re.MULTILINE)))


@dataclass(frozen=True, kw_only=True)
class Active:
    """A run that runs. `before` is the state of its start before this one."""

    run: StudyRun
    before: Optional[RunState]
    process: subprocess.Popen
    gpus: tuple[str, ...]


class LocalRunner:
    """Runs what is due.

    Args:
        script: pretrain_gpt.py.
        parallel: runs at a time; None: as many as the GPUs hold, and one without GPUs.
        tell: shows a line.

    Raises:
        ConfigError: a run needs more GPUs than there are.
    """

    def __init__(
        self, runs: Sequence[StudyRun], script: Path, parallel: Optional[int], gpus: Sequence[str],
        tell: Callable[[str], None],
    ):  # fmt: skip
        self.waiting, self.script, self.tell = list(runs), script, tell
        self.parallel = parallel or (len(gpus) or 1)
        self.free, self.has_gpus = list(gpus), bool(gpus)
        self.active: list[Active] = []
        self.statuses: list[int] = []
        self.asked = self.has_signal = False
        if large := [run.label for run in runs if gpus and run.world_size > len(gpus)]:
            raise ConfigError(f"{labels_text(large)}: more GPUs (gpus) than the {len(gpus)} of this machine")

    def run(self) -> int:
        """Run until nothing is left or a signal came.

        Returns:
            0 when all are done, `PREEMPTED` after a signal, else the first failed run's exit status.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.stop)
        while self.active or (self.waiting and not self.asked):
            while self.waiting and not self.asked and self.start_next():
                pass
            self.pass_on()
            time.sleep(LOOK_S if self.active else 0)
            for one in [one for one in self.active if one.process.poll() is not None]:
                self.finish(one)
        if self.asked:
            return PREEMPTED
        return next((status for status in self.statuses if status), 0)

    def start_next(self) -> bool:
        """Start the first run that waits; False if it has to wait on. Others do not overtake it."""
        run = self.waiting[0]
        needed = run.world_size if self.has_gpus else 0
        if len(self.active) >= self.parallel or len(self.free) < needed:
            return False
        self.waiting.pop(0)
        before = progress_of(run)
        if not is_due(before):  # someone else started it meanwhile
            self.tell(f"{before.state:<10} {run.label}")
            return True
        environment, gpus = dict(os.environ), tuple(self.free[:needed])
        if self.has_gpus:
            self.free = self.free[needed:]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        process = start_run(command_of(run, self.script), run.folder, environment)
        self.active.append(Active(run=run, before=before.found, process=process, gpus=gpus))
        self.tell(f"{'starts':<10} {run.label}" + (f" on GPU {environment['CUDA_VISIBLE_DEVICES']}" if gpus else ""))
        return True

    def finish(self, one: Active) -> None:
        """Say what became of a run whose process has ended."""
        self.active.remove(one)
        self.free += one.gpus
        after = progress_of(one.run)
        # One that ended before its run began, with wrong flags say, has left no state, or that of the start before.
        own = None if after.found is None or after.found.is_of(one.before) else after.found
        if own is not None and after.state in (DONE, STOPPED):
            took = f" in {after.seconds:.0f} s" if after.seconds is not None else ""
            self.tell(f"{after.state:<10} {one.run.label}{took}")
            return
        status = (None if own is None else own.exit_status) or one.process.returncode
        if status == RunFolderInUse.exit_status:
            self.tell(f"{'running':<10} {one.run.label}, started by someone else")
            return
        self.statuses.append(status if status > 0 else INTERNAL)
        state, reason = "failed", f"status {status}, before its run began"
        if own is not None:
            state, reason = after.state, after.reason.splitlines()[0] if after.reason else f"status {status}"
        self.tell(f"{state:<10} {one.run.label}: {reason}; see {one.run.folder / OUTPUT_FILE}")

    def stop(self, number: int, frame: Optional[FrameType]) -> None:
        """Start nothing more; what runs saves and ends. The loop does it: a signal comes amid anything."""
        self.asked = self.has_signal = True

    def pass_on(self) -> None:
        """Hand a signal that came to all that runs."""
        if self.has_signal:
            self.has_signal = False
            for one in self.active:
                one.process.terminate()
