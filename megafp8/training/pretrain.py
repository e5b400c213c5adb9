"""Pretraining: builds the run of a checked command line, trains it, and handles errors that end it."""

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

from megafp8 import __version__
from megafp8.checkpoint.progress import Progress
from megafp8.config import iterations, settings
from megafp8.config.micro_batch_sizes import is_auto
from megafp8.config.schema import RunConfig
from megafp8.data.packed_dataset import packing_text
from megafp8.device.collective_errors import call_on_all_ranks, call_on_rank_0
from megafp8.device.platform import Platform, detect_platform, init_distributed, rank, shutdown_distributed, world_size
from megafp8.errors import INTERNAL, CheckpointError, Megafp8Error, OutOfMemory, PeerLost, RunFolderInUse, causes
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks import Sinks, build_sinks
from megafp8.metrics.sinks.console import FORWARD_FRACTION
from megafp8.models.grouped_moe import close_exchanges
from megafp8.resilience import fault_injection
from megafp8.resilience.run_lock import LOCK_FILE, RunLock, acquire_run_lock
from megafp8.resilience.run_state import RunStateWriter, finished_state, first_state
from megafp8.resilience.watchdog import PhaseClock, Watchdog
from megafp8.resources.automatic import Choice
from megafp8.training.checks import ValidatedRun, check_with_size, chosen_settings, format_chosen, short_warnings
from megafp8.training.evaluation import record_evaluation, validate
from megafp8.training.extension import LoopState
from megafp8.training.extensions import build_extensions
from megafp8.training.extensions.checkpoints import check_checkpoint_folders
from megafp8.training.loop import train_steps
from megafp8.training.memory_report import MemoryReport
from megafp8.training.micro_batch_search.search import choose_micro_batch
from megafp8.training.out_of_memory import check_limits, suggestions_on_memory
from megafp8.training.resume import check_no_newer_checkpoint, resume, resumes_own_run
from megafp8.training.run import Run, run_folder
from megafp8.training.run_record import describe_threads, describe_update, recipe_lines, run_record
from megafp8.training.setup import build_training_run
from megafp8.training.signals import record_stop_signals
from megafp8.training.uploads import upload_records
from megafp8.utils.best_effort import optional_write, reason_of
from megafp8.utils.files import atomic_write
from megafp8.utils.object_store import url_of
from megafp8.utils.process import Process, current_process, exit_later

# Between a stop signal and a kill, by default of torchrun and of Slurm.
DEFAULT_GRACE_S = "30"
# After a communication error, until the system reports a process as ended.
PEER_WAIT_S = 2.0
# Closing communicators may hang if a rank is gone.
SHUTDOWN_TIMEOUT_S = 60.0


def run_training(validated: ValidatedRun) -> int:
    """Build the run and train it; all ranks call it.

    Returns:
        The exit status: 0, or 75 if a signal ended the run.
    """
    config = validated.invocation.config
    if config.logging.logging_level is not None:
        # The root logger needs a handler: without one it prints warnings and errors only, whatever its level.
        logging.basicConfig(level=config.logging.logging_level, force=True)
    if rank() == 0:
        # Warnings about a size that is not known yet would not be those of the run.
        warnings = [] if is_auto(config.training) else warning_lines(validated)
        print("\n".join([opening_line(config), *warnings]), flush=True)
    platform = detect_platform(config.parallel.distributed_backend)
    check_limits()
    with suggestions_on_memory(config), run_watchdog(config) as watchdog:
        init_distributed(platform, config.parallel)
        claim_run(config, watchdog)
        details = dict[str, str]()
        if is_auto(config.training):
            validated, details["micro-batch size"] = find_size(validated, platform, watchdog)
            config = validated.invocation.config
        if not watchdog.stop_agreed:  # a signal may have ended the search for a micro-batch size
            chosen = [*validated.choices, *chosen_settings(config, validated.target, validated.implementation)]
            if rank() == 0 and chosen:
                print(format_chosen(chosen, with_details=config.logging.verbose), flush=True)
            report = MemoryReport(config, rank())
            with suggestions_on_memory(config, report):
                if platform.kind == "cuda":
                    report.start()
                run = dataclasses.replace(
                    build_training_run(config, platform, validated.implementation), watchdog=watchdog
                )
                report.watch(run)
                train(run, details | describe_threads(run))
            run.graph.reset()  # NCCL cannot destroy a communicator that a CUDA graph uses
            close_exchanges(run.training_state.chunks)
        watchdog.finish()
    if rank() == 0:
        upload_records(config)
    exit_later(SHUTDOWN_TIMEOUT_S)
    shutdown_distributed()
    faulthandler.cancel_dump_traceback_later()
    return watchdog.exit_status


def opening_line(config: RunConfig) -> str:
    """The line that opens the output: version and folder of the run."""
    folder = run_folder(config)
    url = None if folder is None else url_of(folder)
    place = "nothing is saved: no --save" if folder is None else f"run folder {folder}"
    return f"megafp8 {__version__} | {place}{'' if url is None else f', uploaded to {url}'}"


def warning_lines(validated: ValidatedRun) -> list[str]:
    """The warnings; with `--verbose` also the recipe of each GEMM."""
    config = validated.invocation.config
    is_verbose = config.logging.verbose
    warnings = validated.warnings if is_verbose else short_warnings(validated.warnings)
    recipes = recipe_lines(config, validated.implementation) if is_verbose else []
    return [*(f"notice: {warning}" for warning in warnings), *recipes]


def find_size(validated: ValidatedRun, platform: Platform, watchdog: Watchdog) -> tuple[ValidatedRun, str]:
    """Replace `--micro-batch-size auto` by the size that trials find, with the choices and warnings of that size.

    All ranks call it.

    Returns:
        The command line, unchanged if a signal ended the search; and how the size was found, or the signal.
    """
    size, detail = choose_micro_batch(validated.invocation.config, platform, validated.implementation, watchdog)
    if size is None:
        return validated, detail
    validated = check_with_size(validated, size)
    if rank() == 0 and (lines := warning_lines(validated)):
        print("\n".join(lines), flush=True)
    choice = Choice("--micro-batch-size", str(size), "the fastest that fits")
    return dataclasses.replace(validated, choices=(*validated.choices, choice)), detail


def train(run: Run, details: Optional[dict[str, str]] = None) -> Progress:
    """Resume the run if there is a checkpoint, and train until it is complete or has to stop; all ranks call it.

    Args:
        details: of the setup, by name; they are recorded as events.

    Returns:
        The progress at the end.
    """
    started = time.monotonic()
    fault_injection.point("run.start")
    run.watchdog.enter("load")
    if not run.config.training.skip_train:
        check_checkpoint_folders(run)
    progress, notes = resume(run)
    if not run.config.training.skip_train:
        check_no_newer_checkpoint(run.config, progress.step)
    run.watchdog.resumed(progress.step, resumes_own_run(run.config))
    total_steps = run.last_step(progress)
    if rank() == 0 and (lines := [*phase_lines(run), *filter(None, [validation_line(run)])]):
        print("\n".join(lines), flush=True)
    with open_sinks(run, total_steps, run.end_sample(progress)) as sinks:
        sinks.write(run_record(run, progress.step or None))
        events = [("checkpoint", note) for note in notes]
        events += [("packing", text) for text in [packing_text(run.datasets[0])] if text]
        for name, detail in [*events, *((details or {}) | describe_update(run)).items()]:
            sinks.write(EventRecord(step=progress.step, name=name, detail=detail))
        if not run.config.training.skip_train:
            state = LoopState(run, sinks, progress, started)
            train_steps(state, build_extensions())
            progress = state.with_extensions(state.progress)
        evaluate_at_end(run, sinks, progress, total_steps)
    if rank() == 0 and progress.step >= total_steps:
        print(*next_commands(run.config), sep="", end="", flush=True)
    return progress


def phase_lines(run: Run) -> list[str]:
    """The phases of data with the epochs of each shard, which tell what is read again; none without `--data-phases`."""
    return list(map(str, run.datasets[0].datasets)) if run.config.data.data_phases and run.datasets[0] else []


def validation_line(run: Run) -> str:
    """What validations read, if that is the default, which makes a short run long; else empty."""
    training = run.config.training
    if run.datasets[1] is None or training.eval_iters != settings.settings_by_name()["training.eval_iters"].default:
        return ""
    when = "" if training.eval_interval is None else f"every {training.eval_interval:,} steps and "
    steps = round(FORWARD_FRACTION * training.eval_iters * run.eval_batch_size / run.batch_schedule.last_batch_size)
    return (
        f"validation: {when}at the end, {training.eval_iters} batches of {run.eval_batch_size} samples, each about the "
        f"time of {max(1, steps)} steps; --eval-iters sets them, 0 turns validation off"
    )


def next_commands(config: RunConfig) -> list[str]:
    """Commands for what a finished run wrote, as lines."""
    folder = run_folder(config)
    if folder is None:
        return []
    has_text = not config.data.mock_data and config.data.tokenizer_type != "NullTokenizer"
    commands = [
        f"megafp8 report {folder} --output-dir {folder / 'report'}",
        f"tensorboard --logdir {config.logging.tensorboard_dir or folder / 'tensorboard'}",
        *([f'megafp8 generate --load {folder} --prompt "..."'] if has_text and config.checkpoint.save else []),
    ]
    return [f"{'next: ' if index == 0 else '      '}{command}\n" for index, command in enumerate(commands)]


def open_sinks(run: Run, total_steps: int, end_sample: int) -> Sinks:
    """The sinks of the records, which only rank 0 writes. Rank 0 also saves the resolved configuration."""
    if run.rank_position.rank != 0:
        return Sinks(())
    folder = run_folder(run.config)
    if folder is not None:
        path = folder / "config.json"
        with optional_write(path), atomic_write(path) as stream:
            stream.write(settings.to_json(run.config).encode())
    return build_sinks(
        run.config.logging,
        run_folder=str(folder) if folder else None,
        total_steps=total_steps,
        total_samples=end_sample,
    )


def evaluate_at_end(run: Run, sinks: Sinks, progress: Progress, total_steps: int) -> None:
    """Evaluate on validation and test data after the last step, or under `--skip-train`."""
    if progress.step < total_steps and not run.config.training.skip_train:
        return
    if not (validate(run, sinks, progress) and record_evaluation(run, sinks, progress, "test", run.datasets[2])):
        record_stop_signals(run.watchdog)


# ---- watchdog, errors and run folder ---------------------------------------------------------------------------------


@contextmanager
def run_watchdog(config: RunConfig) -> Iterator[Watchdog]:
    """Run the watchdog within the context. An error that ends the run is recorded in the run state."""
    watchdog = build_watchdog(config)
    watchdog.start()
    try:
        yield watchdog
    except BaseException as raised:
        clear_frames(raised)  # first, as it frees memory
        error = raised if isinstance(raised, OutOfMemory) else explain_lost_peer(raised, watchdog)
        if watchdog.run_state is not None:
            record_failure(error, watchdog.rank, watchdog.run_state)
        if error is raised:
            raise
        raise error from raised
    finally:
        watchdog.close()
        if watchdog.lock is not None:
            watchdog.lock.release()


def record_failure(error: BaseException, rank: int, journal: RunStateWriter) -> None:
    """Record that the run failed. A completed run stays completed if this start of it was refused."""
    is_refusal = isinstance(error, Megafp8Error) and not isinstance(error, (OutOfMemory, PeerLost))
    if is_refusal and journal.finished is not None:
        journal.restore_finished()
        return
    status = error.exit_status if isinstance(error, Megafp8Error) else INTERNAL
    journal.end("failed", f"rank {rank}: {type(error).__name__}: {error}", status)


def clear_frames(error: BaseException | None) -> None:
    """Clear the local variables in the traceback of an error, since they keep loader processes alive."""
    for each in causes(error):
        traceback.clear_frames(each.__traceback__)


def explain_lost_peer(error: BaseException, watchdog: Watchdog) -> BaseException:
    """The error to report: a lost peer instead of the communication error that it caused, else the error itself."""
    is_sought = any(isinstance(each, (RuntimeError, PeerLost)) for each in causes(error))
    lost = watchdog.find_lost_peer(PEER_WAIT_S) if is_sought else None
    if lost is None:
        return error
    return PeerLost(f"{lost}, so rank {watchdog.rank} ends too. Its own output says why, unless it was killed")


def build_watchdog(config: RunConfig) -> Watchdog:
    """The watchdog of this rank, not yet started."""
    training = config.training
    grace_s = training.exit_signal_grace_s
    if grace_s is None:
        grace_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", DEFAULT_GRACE_S))
    phases = PhaseClock(training.step_timeout_s, training.checkpoint_timeout_s)
    return Watchdog(phases, rank=rank(), grace_s=grace_s, handles_signals=training.exit_signal_handler)


def claim_run(config: RunConfig, watchdog: Watchdog) -> None:
    """Lock the run folder, open the run state, and attach them and the local peers to the watchdog.

    All ranks call it, after torch.distributed is initialized.

    Raises:
        RunFolderInUse: on all ranks: another run writes to the folder.
    """
    folder, lock, journal = run_folder(config), None, None
    if folder is not None:
        lock_or_error = call_on_rank_0(lambda: try_lock(folder))
        if isinstance(lock_or_error, str):
            raise RunFolderInUse(lock_or_error)
        lock = lock_or_error if rank() == 0 else None
        if lock is not None and lock.taken_over:
            print(f"notice: {lock.taken_over}", flush=True)
        last_step = iterations.train_iters(config, world_size())
        finished, state = call_on_rank_0(lambda: (finished_state(folder), first_state(folder, world_size(), last_step)))
        journal = RunStateWriter(folder, state, is_writer=rank() == 0, finished=finished)
        journal.begin()
    watchdog.attach(journal, lock, local_peers())
    if journal is not None:
        check_crashes(journal, config.training.max_crashes)


def check_crashes(journal: RunStateWriter, max_crashes: int) -> None:
    """Refuse to start a run that crashed repeatedly without saving. The count is reset for the next start.

    Raises:
        CheckpointError: on all ranks.
    """
    crashes = journal.state.crashes
    if max_crashes and crashes >= max_crashes:
        journal.update(crashes=0)
        raise CheckpointError(
            f"--save {journal.folder}: the last {crashes} starts of this run crashed before they saved anything "
            f"(--max-crashes {max_crashes}). Their output says why; the count restarts with the next start"
        )


def try_lock(folder: Path) -> Union[RunLock, str]:
    """The lock of the run folder, or why another run holds it.

    Raises:
        CheckpointError: the lock file cannot be written.
    """
    try:
        return acquire_run_lock(folder)
    except RunFolderInUse as error:
        return str(error)
    except OSError as error:
        text = f"--save {folder}: {LOCK_FILE} cannot be written: {reason_of(error)}; make room or choose another folder"
        raise CheckpointError(text) from error


def local_peers() -> dict[int, Process]:
    """The processes of the other ranks on this machine, by rank; all ranks call it."""
    me = current_process()
    return {
        number: process
        for number, process in enumerate(call_on_all_ranks(lambda: me))
        if process.place == me.place and process != me
    }
