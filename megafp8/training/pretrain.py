"""Pretraining from start to end: a checked configuration becomes a run on this process's device, which is trained."""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Optional, Union

from megafp8.checkpoint.progress import Progress
from megafp8.config import derived, settings
from megafp8.config.schema import RunConfig
from megafp8.device.collective_errors import call_on_all_ranks, on_rank_0
from megafp8.device.platform import detect_platform, join_ranks, leave_ranks, rank, world_size
from megafp8.errors import INTERNAL, CheckpointError, Megafp8Error, PeerLost, RunFolderInUse
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks import Sinks, build_sinks
from megafp8.planning.micro_batch import is_auto
from megafp8.resilience import fault_injection
from megafp8.resilience.run_lock import LOCK_FILE, RunLock, take_lock
from megafp8.resilience.run_state import Journal, finished_state, first_state
from megafp8.resilience.watchdog import Guard, Phases
from megafp8.training.checks import Checked
from megafp8.training.evaluation import record_evaluation, validate
from megafp8.training.extension import LoopState
from megafp8.training.extensions import build_extensions
from megafp8.training.extensions.checkpoints import check_folders
from megafp8.training.loop import train_steps
from megafp8.training.micro_batch_search.search import choose_micro_batch
from megafp8.training.resume import check_nothing_newer, resume, saves_where_it_loads
from megafp8.training.run import Run, run_folder
from megafp8.training.run_record import describe_threads, describe_update, recipe_lines, run_record
from megafp8.training.setup import assemble
from megafp8.training.signals import stopped_by_signals
from megafp8.utils.best_effort import optional_write, reason_of
from megafp8.utils.files import atomic_write
from megafp8.utils.process import Process, this_process

# torchrun's, before it kills; also Slurm's.
USUAL_GRACE_S = "30"
# After a communication error, for the system to say that a process is gone.
PEER_WAIT_S = 2.0
# Communicators of ranks that are gone may never close.
LEAVE_S = 60.0


def run_training(checked: Checked) -> int:
    """Train from start to end, or until something ends it; all ranks call it.

    Returns:
        The exit status: 0, or 75 when a signal ended the run.
    """
    config = checked.invocation.config
    if config.logging.logging_level is not None:
        # Without a handler of its own the root logger shows warnings and worse only, whatever its level.
        logging.basicConfig(level=config.logging.logging_level, force=True)
    if rank() == 0:
        for notice in checked.notices:
            print(f"notice: {notice}", flush=True)
        for line in recipe_lines(config, checked.implementation):
            print(line, flush=True)
    platform = detect_platform(config.parallel.distributed_backend)
    with guarded(config) as guard:
        join_ranks(platform, config.parallel)
        claim_run(config, guard)
        choices = {}
        if is_auto(config):
            config, choices["micro-batch size"] = choose_micro_batch(config, platform, checked.implementation, guard)
        if not guard.stop_agreed:  # a signal may have ended the search for a size
            run = dataclasses.replace(assemble(config, platform, checked.implementation), guard=guard)
            train(run, choices | describe_threads(run))
            if run.graph is not None:
                run.graph.forget()  # NCCL ends a communicator only when no graph is left that uses it
        guard.finish()
    faulthandler.dump_traceback_later(LEAVE_S, exit=True)
    leave_ranks()
    faulthandler.cancel_dump_traceback_later()
    return guard.exit_status


def train(run: Run, choices: Optional[dict[str, str]] = None) -> Progress:
    """Train to the end of the run, or to the first reason to stop; all ranks call it.

    Args:
        choices: what was chosen before, for the record: details by name.

    Returns:
        How far the run came.
    """
    started = time.monotonic()
    fault_injection.point("run.start")
    run.guard.enter("load")
    if not run.config.training.skip_train:
        check_folders(run)
    progress, notes = resume(run)
    if not run.config.training.skip_train:
        check_nothing_newer(run, progress.step)
    run.guard.resumed(progress.step, saves_where_it_loads(run.config))
    total_steps = derived.train_iters(run.config, run.place.world_size)
    with open_sinks(run, total_steps) as sinks:
        sinks.write(run_record(run, progress.step or None))
        for note in notes:
            sinks.write(EventRecord(step=progress.step, name="checkpoint", detail=note))
        for name, detail in ((choices or {}) | describe_update(run)).items():
            sinks.write(EventRecord(step=progress.step, name=name, detail=detail))
        if not run.config.training.skip_train:
            state = LoopState(run, sinks, progress, total_steps, started)
            train_steps(state, build_extensions())
            progress = state.progress
        evaluate_at_end(run, sinks, progress, total_steps)
    return progress


def open_sinks(run: Run, total_steps: int) -> Sinks:
    """Where records go: rank 0 writes them, and the resolved configuration beside them."""
    if run.place.rank != 0:
        return Sinks(())
    folder = run_folder(run.config)
    if folder is not None:
        path = folder / "config.json"
        with optional_write(path), atomic_write(path) as stream:
            stream.write(settings.to_json(run.config).encode())
    return build_sinks(run.config.logging, run_folder=str(folder) if folder else None, total_steps=total_steps)


def evaluate_at_end(run: Run, sinks: Sinks, progress: Progress, total_steps: int) -> None:
    """After the last step: validation and, if there is such data, the test."""
    if progress.step < total_steps and not run.config.training.skip_train:
        return
    if not (validate(run, sinks, progress) and record_evaluation(run, sinks, progress, "test", run.datasets[2])):
        stopped_by_signals(run.guard)


# ---- the guard and the run's folder ----------------------------------------------------------------------------------


@contextmanager
def guarded(config: RunConfig) -> Iterator[Guard]:
    """A guard for as long as the run lasts; an error that ends the run is recorded in the run's state."""
    guard = build_guard(config)
    guard.start()
    try:
        yield guard
    except BaseException as raised:
        error = explained(raised, guard)
        if guard.journal is not None:
            record_failure(error, guard.rank, guard.journal)
        clear_frames(raised)
        if error is raised:
            raise
        raise error from raised
    finally:
        guard.close()
        if guard.lock is not None:
            guard.lock.release()


def record_failure(error: BaseException, rank: int, journal: Journal) -> None:
    """Record that the run failed; but one that was done stays done where this start was refused."""
    is_refusal = isinstance(error, Megafp8Error) and not isinstance(error, PeerLost)
    if is_refusal and journal.finished is not None:
        journal.take_back()
        return
    status = error.exit_status if isinstance(error, Megafp8Error) else INTERNAL
    journal.end("failed", f"rank {rank}: {type(error).__name__}: {error}", status)


def clear_frames(error: BaseException | None) -> None:
    """Clear the variables of the functions that an error went through: loader processes live as long as these do."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def explained(error: BaseException, guard: Guard) -> BaseException:
    """The error to report: a communication error often means that a peer died."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, (RuntimeError, PeerLost)):
        link = link.__cause__ or link.__context__
    lost = None if link is None else guard.lost_peer(PEER_WAIT_S)
    if lost is None:
        return error
    return PeerLost(f"{lost}, so rank {guard.rank} ends too. Its own output says why, unless it was killed")


def build_guard(config: RunConfig) -> Guard:
    """The guard of this rank, not yet started."""
    training = config.training
    grace_s = training.exit_signal_grace_s
    if grace_s is None:
        grace_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", USUAL_GRACE_S))
    phases = Phases(training.step_timeout_s, training.checkpoint_timeout_s)
    return Guard(phases, rank=rank(), grace_s=grace_s, takes_signals=training.exit_signal_handler)


def claim_run(config: RunConfig, guard: Guard) -> None:
    """Lock the run's folder, and give the guard what it watches; all ranks call it, once they have met.

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
        CheckpointError: on all ranks. The next start counts from zero.
    """
    crashes = journal.state.crashes
    if most and crashes >= most:
        journal.note(crashes=0)
        raise CheckpointError(
            f"--save {journal.folder}: the last {crashes} starts of this run crashed before they saved anything "
            f"(--max-crashes {most}). Their output says why; a start after this one counts anew"
        )


def lock_or_refusal(folder: Path) -> Union[RunLock, str]:
    """The lock of a run's folder, or why it cannot be had.

    Raises:
        CheckpointError: nothing can be written there.
    """
    try:
        return take_lock(folder)
    except RunFolderInUse as error:
        return str(error)
    except OSError as error:
        text = f"--save {folder}: {LOCK_FILE} cannot be written: {reason_of(error)}; make room or choose another folder"
        raise CheckpointError(text) from error


def peers_here() -> dict[int, Process]:
    """The other ranks on this machine; all ranks call it."""
    me = this_process()
    return {
        number: process
        for number, process in enumerate(call_on_all_ranks(lambda: me))
        if process.place == me.place and process != me
    }
