"""Uploads of a run's checkpoints to object storage, and the copies that a start needs from there."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path
from typing import Any, Optional

from megafp8.checkpoint.directory import Retention, clean_up, complete_steps
from megafp8.checkpoint.object_copies import NUM_LOCAL, BackgroundUpload, Machines, object_copies
from megafp8.checkpoint.save import is_first_rank
from megafp8.config.schema import CheckpointConfig, RunConfig
from megafp8.device.collective_errors import call_on_all_ranks, call_on_rank_0, rank_and_size
from megafp8.errors import CheckpointError, ConfigError, Megafp8Error
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks import Sinks
from megafp8.training.run import Run, non_persistent_folder, run_folder
from megafp8.utils.object_store import ObjectError, is_url, local_path, url_of

# The other ranks wait for rank 0 in a collective, which has a timeout.
WAIT_S = 10.0
UNDER_WAY, FAILED, ENDED = "under way", "failed", "ended"
FOLDERS = {"save": "--save", "load": "--load", "pretrained_checkpoint": "--pretrained-checkpoint"}


class CheckpointUploads:
    """The uploads of a run that saves to object storage; for any other run its methods do nothing.

    Attributes:
        is_divided: the machines of the run have caches of their own, and each uploads the files of its ranks.

    Raises:
        CheckpointError: the machines cannot save with these settings.
    """

    def __init__(self, run: Run, sinks: Sinks):
        self._run, self._sinks = run, sinks
        self._folder = run_folder(run.config)
        self.is_used = self._folder is not None and url_of(self._folder) is not None
        self._upload: Optional[BackgroundUpload] = None
        self._machines = find_machines(self._folder) if self.is_used and self._folder is not None else None
        self.is_divided = self._machines is not None
        if self.is_divided:
            check_divided(run.config)
        if self.is_used and is_first_rank(self.is_divided):
            copies = object_copies(self._folder)
            assert copies is not None
            if run.rank_position.rank != 0:
                clean_up(copies.folder)  # what a killed save left; rank 0 has done it
            # A rollback goes back further than to the newest checkpoints.
            num_local = None if run.config.training.spike_policy == "rollback" else NUM_LOCAL
            self._upload = BackgroundUpload(copies, num_local)

    def begin_pending(self, keep: Optional[Retention]) -> None:
        """Upload the newest local checkpoint, whose upload an earlier start may not have completed."""
        if self._run.rank_position.rank != 0:
            return
        if self._upload is not None and self._folder is not None and (steps := complete_steps(self._folder)):
            self._upload.begin(steps[-1], keep)

    def begin(self, step: int, folder: Optional[Path], keep: Optional[Retention]) -> None:
        """Upload a checkpoint in the background, if it is in the run's own folder and not a non-persistent one."""
        if self._upload is not None and folder == self._folder:
            self._upload.begin(step, keep, self._machines)

    def poll(self) -> None:
        """Record an upload that has succeeded. Calls no collective; a failure waits for `wait`."""
        if self._upload is not None and self._upload.has_succeeded:
            self._record(*self._upload.take_result())

    def wait(self, next_step: Optional[int] = None) -> Optional[tuple[int, Optional[str]]]:
        """Wait for the upload that is under way; all ranks call it.

        Args:
            next_step: the step that is to be saved: a wait is then reported as too slow a link.

        Returns:
            Step and error (None if it succeeded) of an upload that was not reported before.
        """
        if not self.is_used:
            return None
        if next_step is not None and self._upload is not None and self._upload.is_under_way:
            detail = (
                f"step {self._upload.step} is still being uploaded when step {next_step} is to be saved, which waits: "
                "the link is too slow; increase --save-interval"
            )
            self._sinks.write(EventRecord(step=next_step, name="upload late", detail=detail))
        while UNDER_WAY in (states := call_on_all_ranks(self._state)):
            if self._upload is not None and FAILED in states:
                self._upload.cancel()  # rank 0 would wait for that machine
            # Requests have timeouts of their own, so that the upload ends.
            self._run.watchdog.enter("save", next_step)
        results = [result for result in call_on_all_ranks(self._take) if result is not None]
        # The last failure: where rank 0 waited for other machines in vain, one of them knows the reason.
        return next((result for result in reversed(results) if result[1] is not None), results[0] if results else None)

    def _state(self) -> str:
        """Of this rank's upload."""
        if self._upload is None or not self._upload.wait(WAIT_S):
            return ENDED if self._upload is None else UNDER_WAY
        return FAILED if self._upload.has_result and not self._upload.has_succeeded else ENDED

    def _take(self) -> Optional[tuple[int, Optional[str]]]:
        if self._upload is None or not self._upload.has_result:
            return None
        step, text, is_success = self._upload.take_result()
        self._record(step, text, is_success)
        return step, None if is_success else text

    def _record(self, step: int, text: str, is_success: bool) -> None:
        if is_success:
            self._sinks.write(EventRecord(step=step, name="checkpoint uploaded", detail=text))


def find_machines(folder: Path) -> Optional[Machines]:
    """The machines of the run, if the cache with this folder is another one on each; all ranks call it.

    Raises:
        CheckpointError: on all ranks: some machines share the cache, others do not.
    """
    rank, is_first = rank_and_size()[0], is_first_rank(is_divided=True)
    first_ranks = [each for each in call_on_all_ranks(lambda: rank if is_first else None) if each is not None]
    if len(first_ranks) == 1:
        return None
    token = call_on_rank_0(lambda: uuid.uuid4().hex)
    probes = {each: folder / f".machine-{token}-{each}" for each in first_ranks}

    def write() -> None:
        if is_first:
            folder.mkdir(parents=True, exist_ok=True)
            probes[rank].touch()

    call_on_all_ranks(write)
    # By name: a network file system may not list a new file for a while.
    seen = call_on_all_ranks(lambda: sum(probe.exists() for probe in probes.values()))
    if is_first:
        probes[rank].unlink(missing_ok=True)
    if set(seen) == {len(first_ranks)}:
        return None
    if set(seen) != {1}:
        raise CheckpointError(
            f"--save: {folder} is the same folder on some machines and not on others: set MEGAFP8_CACHE to a folder "
            "that all share, or to one of each machine"
        )
    return Machines(rank if is_first else -1, tuple(each for each in first_ranks if each), token)


def check_divided(config: RunConfig) -> None:
    """Refuse settings that need all files of a checkpoint on one machine.

    Raises:
        CheckpointError: there are such settings.
    """
    own, non_persistent = run_folder(config), non_persistent_folder(config)
    problems = {
        "--spike-policy rollback": config.training.spike_policy == "rollback",
        "--non-persistent-save-interval without --non-persistent-global-ckpt-dir": (
            non_persistent is not None and non_persistent.parent == own
        ),
    }
    for flag, is_given in problems.items():
        if is_given:
            raise CheckpointError(
                f"{flag}: the machines of this run do not share the cache {own}, so that each has only a part of a "
                "checkpoint: set MEGAFP8_CACHE to a folder that all share, or remove the flag"
            )


def upload_records(config: RunConfig) -> None:
    """Upload the records of a run that has ended, on rank 0. A failure is reported only."""
    try:
        if (copies := object_copies(run_folder(config))) is not None:
            copies.upload_records()
    except OSError as error:
        print(f"megafp8: the last records are not uploaded: {error}", flush=True)


def with_local_folders(config: CheckpointConfig) -> CheckpointConfig:
    """The settings with the places of URLs in the local cache, which all that follows uses.

    Raises:
        ConfigError: an invalid URL, or obstore is missing.
    """
    values = {name: url for name in FOLDERS if (url := getattr(config, name)) is not None and is_url(url)}
    places: dict[str, Any] = {}
    problems = []
    for name, url in values.items():
        try:
            places[name] = str(local_path(url))
            object_copies(Path(places[name]))
        except ObjectError as error:
            problems.append(f"{FOLDERS[name]} {error}")
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(config, **places)


def download_checkpoints(config: CheckpointConfig, with_hashes: bool = False) -> tuple[str, ...]:
    """Download the checkpoints to load from object storage, unless they are in the local cache; returns notes.

    Every rank calls it: the first of a machine downloads, and the others wait for it.

    Args:
        with_hashes: hash those in the local cache.

    Raises:
        CheckpointError: a request was refused, or the cache cannot be written.
        Megafp8Error: requests failed repeatedly.
    """
    notes: tuple[str, ...] = ()
    for name in ("load", "pretrained_checkpoint"):
        folder = getattr(config, name)
        try:
            if folder is None or (copies := object_copies(Path(folder))) is None:
                continue
            is_load = name == "load"
            is_own = is_load and config.save is not None and Path(config.save) == Path(folder)
            notes += copies.download(config.ckpt_step if is_load else None, is_own, with_hashes)
        except OSError as error:
            # After an outage a restart may help, as its exit status says.
            is_outage = isinstance(error, ObjectError) and error.is_outage
            raise (Megafp8Error if is_outage else CheckpointError)(f"{FOLDERS[name]} {error}") from error
    return notes


def newest_step(folder: Path) -> Optional[int]:
    """The newest complete checkpoint of a folder in object storage; None for any other folder, or without one.

    Raises:
        CheckpointError: a request failed.
    """
    try:
        copies = object_copies(folder)
        return None if copies is None else max(copies.complete_steps(), default=None)
    except OSError as error:
        raise CheckpointError(f"--save {error}") from error
