"""Uploads of a run's checkpoints to object storage, and the copies that a start needs from there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Optional

from megafp8.checkpoint.directory import Retention, complete_steps
from megafp8.checkpoint.object_copies import NUM_LOCAL, BackgroundUpload, object_copies
from megafp8.config.schema import CheckpointConfig, RunConfig
from megafp8.device.collective_errors import call_on_rank_0
from megafp8.errors import CheckpointError, ConfigError, Megafp8Error
from megafp8.metrics.records import EventRecord
from megafp8.metrics.sinks import Sinks
from megafp8.training.run import Run, run_folder
from megafp8.utils.object_store import ObjectError, is_url, local_path, url_of

# The other ranks wait for rank 0 in a collective, which has a timeout.
WAIT_S = 10.0
FOLDERS = {"save": "--save", "load": "--load", "pretrained_checkpoint": "--pretrained-checkpoint"}


class CheckpointUploads:
    """The uploads of a run that saves to object storage; for any other run its methods do nothing."""

    def __init__(self, run: Run, sinks: Sinks):
        self._run, self._sinks = run, sinks
        self._folder = run_folder(run.config)
        self.is_used = self._folder is not None and url_of(self._folder) is not None
        self._upload: Optional[BackgroundUpload] = None
        if self.is_used and run.rank_position.rank == 0:
            copies = object_copies(self._folder)
            assert copies is not None
            # A rollback goes back further than to the newest checkpoints.
            num_local = None if run.config.training.spike_policy == "rollback" else NUM_LOCAL
            self._upload = BackgroundUpload(copies, num_local)

    def begin_pending(self, keep: Optional[Retention]) -> None:
        """Upload the newest local checkpoint, whose upload an earlier start may not have completed."""
        if self._upload is not None and self._folder is not None and (steps := complete_steps(self._folder)):
            self._upload.begin(steps[-1], keep)

    def begin(self, step: int, path: Path, keep: Optional[Retention]) -> None:
        """Upload a checkpoint in the background, if it is in the run's own folder and not a non-persistent one."""
        if self._upload is not None and path.parent == self._folder:
            self._upload.begin(step, keep)

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
        while not call_on_rank_0(self._has_ended):
            # Requests have timeouts of their own, so that the upload ends.
            self._run.watchdog.enter("save", next_step)
        return call_on_rank_0(self._take)

    def _has_ended(self) -> bool:
        return self._upload is None or self._upload.wait(WAIT_S)

    def _take(self) -> Optional[tuple[int, Optional[str]]]:
        if self._upload is None or not self._upload.has_result:
            return None
        step, text, is_success = self._upload.take_result()
        self._record(step, text, is_success)
        return step, None if is_success else text

    def _record(self, step: int, text: str, is_success: bool) -> None:
        if is_success:
            self._sinks.write(EventRecord(step=step, name="checkpoint uploaded", detail=text))


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
