"""Copies of a run's checkpoints in object storage. The run's folder is the place of the URL in the local cache.

    URL/iter_0000120/...                      the files of a checkpoint; its manifest.json is uploaded last
    URL/latest_checkpointed_iteration.txt     the pointer, after the manifest; informational as in a folder
    URL/records.jsonl, URL/tensorboard/...    records of the run, with each checkpoint

A checkpoint in object storage is complete if it has a manifest, so an upload that was killed leaves none. A run uploads
in a thread of rank 0, after the rename in the local folder. One upload is under way at a time, and no save begins
before it has ended: neither of the two can delete what the other one needs.

Machines that do not share the local folder each upload the files of their ranks from the unfinished checkpoint there,
and then a marker. Rank 0 waits for the markers before it uploads the manifest.

Before a run starts, the newest complete checkpoint is downloaded unless the local folder has it. Local checkpoints that
are newer are kept if they continue the remote ones, which `SEEN` tells: the manifest that this folder last saw as the
newest. Otherwise another machine has continued the run, and they are set aside.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megafp8.checkpoint.directory import (
    POINTER,
    RETIRED,
    Retention,
    checkpoint_path,
    complete_steps,
    make_unfinished_folder,
    prune,
    set_aside,
    unfinished_path,
)
from megafp8.checkpoint.manifest import (
    FOLDER_NAME,
    MANIFEST,
    Manifest,
    differences,
    find_damage,
    folder_name,
    read_manifest,
    relative_files,
    summarize,
)
from megafp8.errors import CheckpointError
from megafp8.resilience.run_lock import LOCK_FILE
from megafp8.utils.files import atomic_write, atomic_write_text, sync_folder
from megafp8.utils.object_store import ObjectError, ObjectFolder, ObjectInfo, url_of
from megafp8.utils.process import in_thread

SEEN, CACHE_LOCK = ".newest_in_object_storage", ".cache.lock"
RETIRED_MANIFEST = MANIFEST + RETIRED
TENSORBOARD = "tensorboard"
# Complete checkpoints that stay in the local folder after an upload: the second is read if the first is damaged.
NUM_LOCAL = 2
MARKER, MARKER_POLL_S = ".uploaded-", 2.0


@dataclass(frozen=True)
class Machines:
    """The machines of a run whose caches are their own.

    Attributes:
        rank: the first one of this machine.
        others: the first ranks of the machines without rank 0.
        token: of this start: markers of an earlier one do not count.
    """

    rank: int
    others: tuple[int, ...]
    token: str


@dataclass
class ObjectCopies:
    """The checkpoints of one run in object storage, for its local folder."""

    folder: Path
    store: ObjectFolder

    # ---- what there is -----------------------------------------------------------------------------------------------

    def listing(self) -> dict[int, dict[str, ObjectInfo]]:
        """The objects of each checkpoint, by step and name in it. Incomplete ones are included."""
        found: dict[int, dict[str, ObjectInfo]] = {}
        for name, info in self.store.find().items():
            top, _, rest = name.partition("/")
            if (match := FOLDER_NAME.fullmatch(top)) and rest:
                found.setdefault(int(match[1]), {})[rest] = info
        return dict(sorted(found.items()))

    def complete_steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending."""
        return [step for step, files in self.listing().items() if MANIFEST in files]

    # ---- to object storage -------------------------------------------------------------------------------------------

    def upload(
        self,
        step: int,
        keep: Optional[Retention],
        num_local: Optional[int] = NUM_LOCAL,
        machines: Optional[Machines] = None,
        is_cancelled: Optional[threading.Event] = None,
    ) -> str:
        """Upload a complete local checkpoint and the records; then delete old ones there and here.

        Args:
            keep: the checkpoints to keep in object storage; None keeps all.
            num_local: newest checkpoints that stay in the local folder; None deletes none.
            machines: each has only the files of its ranks, which its first rank uploads from the unfinished checkpoint.
            is_cancelled: ends the wait for other machines.

        Returns:
            What was done, as text.

        Raises:
            ObjectError: a request failed. The checkpoint is not complete in object storage.
            CheckpointError: the local checkpoint is damaged, or another machine has not uploaded its files.
        """
        started, path = time.monotonic(), checkpoint_path(self.folder, step)
        if machines is not None:
            path = unfinished_path(self.folder, step)
            if machines.rank != 0:
                return self._upload_part(step, path, machines)
        try:
            return self._upload_complete(
                step, path, keep, num_local, machines, is_cancelled or threading.Event(), started
            )
        finally:
            if machines is not None:  # no machine could load it
                shutil.rmtree(path, ignore_errors=True)

    def _upload_complete(
        self, step: int, path: Path, keep: Optional[Retention], num_local: Optional[int], machines: Optional[Machines],
        is_cancelled: threading.Event, started: float,
    ) -> str:  # fmt: skip
        """See `upload`.

        Args:
            path: of the checkpoint in the local folder.
            started: time of the start.
        """
        manifest, content = read_manifest(path), (path / MANIFEST).read_bytes()
        if machines is None and (problems := differences(path, manifest)):
            raise CheckpointError(f"{path} cannot be uploaded: {summarize(problems)}")
        name = folder_name(step)
        present = self.listing().get(step, {})
        if MANIFEST in present and self.store.read(f"{name}/{MANIFEST}") != content:
            self.store.delete([f"{name}/{MANIFEST}"])  # its files are about to be replaced
            present = {}
        if MANIFEST not in present:
            for each in manifest.files:
                if machines is None or (path / each).exists():
                    self.store.upload(path / each, f"{name}/{each}")
            if machines is not None:
                self._wait_for_parts(name, machines, is_cancelled)
            self._check_sizes(step, manifest)
            self.upload_records()
            self.store.write(f"{name}/{MANIFEST}", content)
        self.store.write(POINTER, f"{step}\n".encode())
        atomic_write_text(self.folder / SEEN, hashlib.sha256(content).hexdigest())
        self._prune(step, keep)
        if machines is not None:
            self.store.delete([marker_of(name, rank) for rank in machines.others])
        if num_local is not None:
            prune(self.folder, Retention(num_local), protected_step=step)
        seconds = time.monotonic() - started
        return f"{self.store.url}/{name}, {manifest.num_bytes / 1e9:.3f} GB in {seconds:.1f} s"

    def _upload_part(self, step: int, path: Path, machines: Machines) -> str:
        """Upload the files of this machine's ranks, and delete them and older downloads here."""
        name = folder_name(step)
        try:
            for each in sorted(relative_files(path)):
                self.store.upload(path / each, f"{name}/{each}")
            self.store.write(marker_of(name, machines.rank), machines.token.encode())
        finally:
            shutil.rmtree(path, ignore_errors=True)
        prune(self.folder, Retention(NUM_LOCAL))
        return f"{self.store.url}/{name}"

    def _wait_for_parts(self, name: str, machines: Machines, is_cancelled: threading.Event) -> None:
        """Wait until all other machines have uploaded the files of their ranks.

        Raises:
            CheckpointError: the wait was cancelled, because one of them failed.
        """
        missing = {marker_of(name, rank) for rank in machines.others}
        while True:
            present = missing & set(self.store.find(name))
            missing -= {marker for marker in present if self.store.read(marker) == machines.token.encode()}
            if not missing:
                return
            if is_cancelled.wait(MARKER_POLL_S):
                raise CheckpointError("another machine has not uploaded its files")

    def _check_sizes(self, step: int, manifest: Manifest) -> None:
        name = folder_name(step)
        found = self.store.find(name)
        for each, entry in manifest.files.items():
            info = found.get(f"{name}/{each}")
            if info is None or info.num_bytes != entry.num_bytes:
                size = "is missing" if info is None else f"has {info.num_bytes} bytes instead of {entry.num_bytes}"
                raise CheckpointError(f"{self.store.url}/{name}/{each} {size} after its upload")

    def _prune(self, step: int, keep: Optional[Retention]) -> None:
        """Delete the checkpoints that are not kept, and what killed uploads and deletions left of older ones."""
        listing = self.listing()
        complete = [each for each, files in listing.items() if MANIFEST in files]
        outdated = [] if keep is None else keep.outdated(complete)
        torn = [each for each, files in listing.items() if not {MANIFEST, RETIRED_MANIFEST} & set(files)]
        for each in (*outdated, *torn):
            if each < step:
                # The manifest first: without it, the rest is no checkpoint.
                names = sorted(listing[each], key=lambda name: name != MANIFEST)
                self.store.delete([f"{folder_name(each)}/{name}" for name in names])

    def retire(self, step: int) -> None:
        """Make a checkpoint one that no run loads; its files are kept."""
        name = folder_name(step)
        if self.store.info(f"{name}/{MANIFEST}") is not None:
            self.store.rename(f"{name}/{MANIFEST}", f"{name}/{RETIRED_MANIFEST}")

    def upload_records(self) -> None:
        """Upload the run's records and settings: files beside the checkpoints, and those of TensorBoard."""
        present = self._remote_records()
        for name, path in self._records():
            num_bytes = path.stat().st_size
            if name not in present or present[name].num_bytes != num_bytes or num_bytes < 1 << 20:
                self.store.upload(path, name)

    def _records(self) -> Iterator[tuple[str, Path]]:
        for path in sorted((*self.folder.glob("*"), *(self.folder / TENSORBOARD).rglob("*"))):
            if path.is_file() and is_record(path.name):
                yield path.relative_to(self.folder).as_posix(), path

    def _remote_records(self) -> dict[str, ObjectInfo]:
        found = self.store.find(is_deep=False) | self.store.find(TENSORBOARD)
        return {name: info for name, info in found.items() if is_record(name.rpartition("/")[2])}

    # ---- from object storage -----------------------------------------------------------------------------------------

    def download(self, step: Optional[int], is_own: bool, with_hashes: bool = False) -> tuple[str, ...]:
        """Make the newest complete checkpoint, or that of `step`, one of the local folder; returns notes.

        Processes of a machine call it at the same time: one downloads, the others wait.

        Args:
            is_own: the run saves to this folder.
            with_hashes: hash the local checkpoint; otherwise its sizes are compared.

        Raises:
            ObjectError: a request failed.
        """
        with self._locked():
            listing = self.listing()
            steps = [each for each, files in listing.items() if MANIFEST in files and step in (None, each)]
            is_needed = not is_own if step is None else step not in complete_steps(self.folder)
            if not steps and is_needed:
                what = "no complete checkpoint" + ("" if step is None else f" of step {step}")
                raise ObjectError(errno.ENOENT, what, self.store.url)
            contents = {each: self.store.read(f"{folder_name(each)}/{MANIFEST}") for each in steps[-1:]}
            notes: list[str] = []
            if is_own:
                has_moved = step is None and bool(steps) and self._has_moved(steps[-1], contents[steps[-1]])
                notes = self._set_newer_aside(steps[-1]) if has_moved else []
                self._download_records(has_moved)
            for each in reversed(steps):
                content = contents.get(each) or self.store.read(f"{folder_name(each)}/{MANIFEST}")
                try:
                    self._download_one(each, content, listing[each], with_hashes)
                except CheckpointError as error:
                    notes.append(f"{error}; using the previous checkpoint")
                    continue
                if is_own and step is None:
                    atomic_write_text(self.folder / SEEN, hashlib.sha256(content).hexdigest())
                break
            return tuple(notes)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / CACHE_LOCK, "w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield

    def _has_moved(self, newest: int, content: bytes) -> bool:
        """Whether another machine has continued the run: the newest checkpoint there is not known here.

        Args:
            content: of its manifest.
        """
        seen, mine = self.folder / SEEN, checkpoint_path(self.folder, newest) / MANIFEST
        if seen.is_file() and seen.read_text() == hashlib.sha256(content).hexdigest():
            return False
        return not (mine.is_file() and mine.read_bytes() == content)

    def _set_newer_aside(self, newest: int) -> list[str]:
        """Set aside the local checkpoints after a step; return notes."""
        newer = [step for step in complete_steps(self.folder) if step > newest]
        return [
            f"{checkpoint_path(self.folder, step)} was never uploaded, and another machine has continued the run in "
            f"{self.store.url}: renamed to {set_aside(checkpoint_path(self.folder, step), RETIRED).name}"
            for step in newer
        ]

    def _download_one(self, step: int, content: bytes, files: dict[str, ObjectInfo], with_hashes: bool) -> None:
        """Download a checkpoint unless the local folder has the same.

        Raises:
            CheckpointError: what is in object storage is damaged.
            ObjectError: a request failed.
        """
        final, unfinished = checkpoint_path(self.folder, step), unfinished_path(self.folder, step)
        url = self.store.name_of(folder_name(step))
        if (final / MANIFEST).is_file() and (final / MANIFEST).read_bytes() == content:
            problems = find_damage(final, with_hashes)
            if not problems:
                return
        make_unfinished_folder(self.folder, step, sum(info.num_bytes for info in files.values()))
        (unfinished / MANIFEST).write_bytes(content)
        try:
            manifest = read_manifest(unfinished)
            (unfinished / MANIFEST).unlink()
            if manifest.step != step:
                raise CheckpointError(f"{MANIFEST} is of step {manifest.step}")
            for name, entry in manifest.files.items():
                if name not in files or files[name].num_bytes != entry.num_bytes:
                    raise CheckpointError(f"{name} is missing or has another size than in {MANIFEST}")
                if not (unfinished / name).resolve().is_relative_to(unfinished.resolve()):
                    raise CheckpointError(f"{MANIFEST} names a file outside of the checkpoint")
                self.store.download(f"{folder_name(step)}/{name}", unfinished / name, entry.sha256, files[name])
        except (CheckpointError, ObjectError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if isinstance(error, ObjectError) and not error.is_damage:
                raise
            raise CheckpointError(f"{url} is damaged ({error})") from error
        with atomic_write(unfinished / MANIFEST) as stream:
            stream.write(content)
        if final.exists():
            shutil.rmtree(final)  # another checkpoint, or a damaged copy of this one
        unfinished.rename(final)
        sync_folder(self.folder)

    def _download_records(self, has_moved: bool) -> None:
        """Download the run's records where the local folder has none, or all if another machine has continued it."""
        for name, info in self._remote_records().items():
            path = self.folder / name
            if has_moved or not path.exists():
                self.store.download(name, path, info=info)


def marker_of(name: str, rank: int) -> str:
    """The object that says that the machine of a rank has uploaded its files of a checkpoint."""
    return f"{name}/{MARKER}{rank}"


def is_record(name: str) -> bool:
    """Whether a file beside the checkpoints belongs to the run's records."""
    return not name.startswith(".") and name not in (LOCK_FILE, POINTER)


def object_copies(folder: Optional[Path]) -> Optional[ObjectCopies]:
    """The copies of a run's folder in object storage; None if the folder is not the place of a URL in the cache."""
    url = None if folder is None else url_of(folder)
    return None if folder is None or url is None else ObjectCopies(folder, ObjectFolder(url))


class BackgroundUpload:
    """Uploads of one run in a thread, one after the other. Rank 0 has one, or the first rank of each machine.

    Attributes:
        step: of the checkpoint whose upload is under way or was not reported yet; None without one.
    """

    def __init__(self, copies: ObjectCopies, num_local: Optional[int]):
        self._copies, self._num_local = copies, num_local
        self.step: Optional[int] = None
        self._work: Optional[Future[str]] = None
        self._is_cancelled = threading.Event()

    def begin(self, step: int, keep: Optional[Retention], machines: Optional[Machines] = None) -> None:
        """Start an upload. None may be under way."""
        assert self._work is None
        self.step, self._is_cancelled = step, threading.Event()
        self._work = in_thread(self._copies.upload, step, keep, self._num_local, machines, self._is_cancelled)

    def cancel(self) -> None:
        """Let the upload fail where it waits for other machines."""
        self._is_cancelled.set()

    @property
    def is_under_way(self) -> bool:
        """Whether an upload has not ended."""
        return self._work is not None and not self._work.done()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of an upload; returns whether it has ended."""
        from concurrent.futures import wait

        return self._work is None or bool(wait([self._work], timeout_s).done)

    def take_result(self) -> tuple[int, str, bool]:
        """Step, description and success of an upload that has ended, which is then forgotten."""
        assert self._work is not None and self.step is not None
        work, step = self._work, self.step
        self._work = self.step = None
        error = work.exception()
        return step, work.result() if error is None else str(error), error is None

    @property
    def has_result(self) -> bool:
        """Whether an upload has ended whose result was not taken."""
        return self._work is not None and self._work.done()

    @property
    def has_succeeded(self) -> bool:
        """Whether an upload has succeeded whose result was not taken."""
        return self._work is not None and self._work.done() and self._work.exception() is None
