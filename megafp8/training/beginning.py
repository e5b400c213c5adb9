"""What all ranks do together before a run may write anything: one run a folder, who is who, and which start this is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Union

from megafp8.checkpoint.together import on_rank_0, together
from megafp8.config import derived
from megafp8.config.schema import RunConfig
from megafp8.device.platform import rank, world_size
from megafp8.errors import CheckpointError, RunFolderInUse
from megafp8.launch.process import Process, this_process
from megafp8.launch.run_lock import RunLock, take_lock
from megafp8.launch.run_state import finished_state
from megafp8.training.guard import Guard
from megafp8.training.journal import Journal, first_state
from megafp8.training.phases import Phases
from megafp8.training.setup import run_folder

# torchrun's, before it kills; also Slurm's.
USUAL_GRACE_S = "30"


def build_guard(config: RunConfig) -> Guard:
    """The guard of this rank, not yet started."""
    training = config.training
    grace_s = training.exit_signal_grace_s
    if grace_s is None:
        grace_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", USUAL_GRACE_S))
    phases = Phases(training.step_timeout_s, training.checkpoint_timeout_s)
    return Guard(phases, rank=rank(), grace_s=grace_s, takes_signals=training.exit_signal_handler)


def begin(config: RunConfig, guard: Guard) -> None:
    """Take the run's folder, and tell the guard what there is to watch; all ranks call it, once they have met.

    Raises:
        RunFolderInUse: on all ranks: another run writes there.
    """
    folder, lock, journal = run_folder(config), None, None
    if folder is not None:
        answer = on_rank_0(lambda: lock_or_refusal(folder))
        if isinstance(answer, str):
            raise RunFolderInUse(answer)
        lock = answer if rank() == 0 else None
        if lock is not None and lock.taken_over:
            print(f"notice: {lock.taken_over}", flush=True)
        last_step = derived.train_iters(config, world_size())
        finished, state = on_rank_0(lambda: (finished_state(folder), first_state(folder, world_size(), last_step)))
        journal = Journal(folder, state, is_writer=rank() == 0, finished=finished)
        journal.begin()
    guard.attach(journal, lock, peers_here())
    if journal is not None:
        check_crashes(journal, config.training.max_crashes)


def check_crashes(journal: Journal, most: int) -> None:
    """Stop a run that crashes again and again without saving anything.

    Raises:
        CheckpointError: on all ranks. The next start begins to count anew.
    """
    crashes = journal.state.crashes
    if most and crashes >= most:
        journal.note(crashes=0)
        raise CheckpointError(
            f"--save {journal.folder}: the last {crashes} starts of this run crashed before they saved anything "
            f"(--max-crashes {most}). Their output says why; a start after this one counts anew"
        )


def lock_or_refusal(folder: Path) -> Union[RunLock, str]:
    """The lock of a run's folder, or why it cannot be had."""
    try:
        return take_lock(folder)
    except RunFolderInUse as error:
        return str(error)


def peers_here() -> dict[int, Process]:
    """The other ranks on this machine; all ranks call it."""
    me = this_process()
    return {
        number: process
        for number, process in enumerate(together(lambda: me))
        if process.place == me.place and process != me
    }
