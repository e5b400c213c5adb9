"""A checked configuration becomes a run on this process's device."""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megafp8.config.micro_batch import is_auto
from megafp8.config.schema import RunConfig
from megafp8.device.platform import detect_platform, join_ranks, leave_ranks, rank
from megafp8.errors import INTERNAL, Megafp8Error, PeerLost
from megafp8.training.assemble import assemble
from megafp8.training.beginning import begin, build_guard
from megafp8.training.checks import Checked
from megafp8.training.guard import Guard
from megafp8.training.journal import Journal
from megafp8.training.loop import train
from megafp8.training.micro_batch_search.search import choose_micro_batch
from megafp8.training.run_record import recipe_lines

# After a communication error, for the system to say that a process is gone.
LOOK_S = 2.0
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
        join_ranks(platform, config.parallel.distributed_timeout_minutes)
        begin(config, guard)
        told = {}
        if is_auto(config):
            config, told["micro-batch size"] = choose_micro_batch(
                config, platform, checked.implementation, guard
            )
        if not guard.stop_agreed:  # a signal may have ended the search for a size
            run = dataclasses.replace(assemble(config, platform, checked.implementation), guard=guard)
            train(run, told)
            if run.graph is not None:
                run.graph.forget()  # NCCL ends a communicator only when no graph is left that uses it
        guard.finish()
    faulthandler.dump_traceback_later(LEAVE_S, exit=True)
    leave_ranks()
    faulthandler.cancel_dump_traceback_later()
    return guard.exit_status


@contextmanager
def guarded(config: RunConfig) -> Iterator[Guard]:
    """A guard for as long as the run lasts; what ends it by an error is put on record."""
    guard = build_guard(config)
    guard.start()
    try:
        yield guard
    except BaseException as raised:
        error = explained(raised, guard)
        if guard.journal is not None:
            put_on_record(error, guard.rank, guard.journal)
        let_go(raised)
        if error is raised:
            raise
        raise error from raised
    finally:
        guard.close()
        if guard.lock is not None:
            guard.lock.release()


def put_on_record(error: BaseException, rank: int, journal: Journal) -> None:
    """The run failed; but one that was done stays done where this start was refused."""
    is_refusal = isinstance(error, Megafp8Error) and not isinstance(error, PeerLost)
    if is_refusal and journal.finished is not None:
        journal.take_back()
        return
    status = error.exit_status if isinstance(error, Megafp8Error) else INTERNAL
    journal.end("failed", f"rank {rank}: {type(error).__name__}: {error}", status)


def let_go(error: BaseException | None) -> None:
    """Forget the variables of the functions that an error went through: loader processes live as long as these do."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def explained(error: BaseException, guard: Guard) -> BaseException:
    """A communication error is what remains of a peer that died: then say so."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, (RuntimeError, PeerLost)):
        link = link.__cause__ or link.__context__
    lost = None if link is None else guard.lost_peer(LOOK_S)
    if lost is None:
        return error
    return PeerLost(f"{lost}, so rank {guard.rank} ends too. Its own output says why, unless it was killed")
