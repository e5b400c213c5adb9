"""A study's runs as processes of this machine, some at a time, each with GPUs of its own where there are any."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

from megafp8.errors import INTERNAL, PREEMPTED, ConfigError, RunFolderInUse
from megafp8.launch.batch import OUTPUT_FILE, Batch, BatchRun, Outcome
from megafp8.studies.progress import DONE, RUNNING, STOPPED, is_due, progress_of
from megafp8.studies.runs import StudyRun, labels_text


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


def check_gpus(runs: Sequence[StudyRun], gpus: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: a run needs more GPUs than there are.
    """
    if large := [run.label for run in runs if gpus and run.world_size > len(gpus)]:
        raise ConfigError(f"{labels_text(large)}: more GPUs (gpus) than the {len(gpus)} of this machine")


def run_here(
    runs: Sequence[StudyRun], script: Path, parallel: Optional[int], gpus: Sequence[str], tell: Callable[[str], None]
) -> int:
    """Run what is due until nothing is left or a signal came.

    Args:
        script: pretrain_gpt.py.
        parallel: runs at a time; None: as many as the GPUs hold, and one without GPUs.
        gpus: of this machine; enough for every run (`check_gpus`).
        tell: shows a line.

    Returns:
        0 when all are done, `PREEMPTED` after a signal, else the first failed run's exit status.
    """
    statuses: list[int] = []
    of_folder = {run.folder: run for run in runs}

    def is_still_due(run: BatchRun) -> bool:
        now = progress_of(of_folder[run.folder])
        if not is_due(now):  # someone else started it meanwhile
            tell(f"{now.state:<10} {run.name}")
        return is_due(now)

    def tell_start(run: BatchRun, gpus: Sequence[str]) -> None:
        tell(f"{'starts':<10} {run.name}" + (f" on GPU {','.join(gpus)}" if gpus else ""))

    def tell_end(outcome: Outcome) -> None:
        statuses.append(status_of(outcome))
        tell(end_text(outcome))

    batch = Batch(parallel or len(gpus) or 1, gpus, tell_start=tell_start, tell_end=tell_end, is_due=is_still_due)
    batch.run([
        BatchRun(name=run.label, command=tuple(command_of(run, script)), folder=run.folder, gpus=run.world_size)
        for run in runs
    ])  # fmt: skip
    if batch.is_asked_to_stop:
        return PREEMPTED
    return next((status for status in statuses if status), 0)


def status_of(outcome: Outcome) -> int:
    """What a run's end means for the study; 0 also for one that its flags stopped, or that someone else has."""
    ended_well = outcome.state is not None and outcome.state.state in (DONE, STOPPED)
    return 0 if ended_well or is_elsewhere(outcome) else outcome.exit_status or INTERNAL


def end_text(outcome: Outcome) -> str:
    """What became of a run, in a line."""
    never = "preempted" if outcome.is_stopped else "failed"
    label, state = outcome.run.name, never if outcome.state is None else outcome.state.state
    if is_elsewhere(outcome):
        return f"{RUNNING:<10} {label}, started by someone else"
    if state in (DONE, STOPPED):
        return f"{state:<10} {label} in {outcome.seconds:.0f} s"
    reason = outcome.reason.splitlines()[0]
    return f"{state:<10} {label}: {reason}; see {outcome.run.folder / OUTPUT_FILE}"


def is_elsewhere(outcome: Outcome) -> bool:
    """Whether someone else has the folder: torchrun does not say it, but then the state is of a run that goes on."""
    is_running = outcome.state is not None and outcome.state.state == RUNNING
    return is_running or outcome.exit_status == RunFolderInUse.exit_status
