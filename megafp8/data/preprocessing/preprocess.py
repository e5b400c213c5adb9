"""Preprocessing: tokenizes text into shards, as fast as the tokenizer allows.

The input is divided into parts (`plan`). Workers read and tokenize parts and write them to files (`workers`,
`part_files`); only counts return to this process, which appends finished parts to the shards in the order of the input
while the workers continue (`assembly`). The shards do not depend on the number of workers, and a job that was killed
resumes from the parts that are complete.

Several machines divide a job: each makes the parts of its share (`shares`) in the same folder, and one of them merges
all parts in the same way.

Memory: that of each worker, see `workers`; here about one kilobyte per part, of which there are a few thousand at most.
Disk: the tokens twice until the shards are complete, where the file system cannot share blocks."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from glob import escape
from typing import Any, BinaryIO, Optional, Union

from megafp8.data.preprocessing.assembly import ShardAssembly
from megafp8.data.preprocessing.part_files import LOCK, SETUP_LOCK, PartFolder, PartRecord
from megafp8.data.preprocessing.plan import InputTask, PreprocessJob, build_tasks, choose_part_bytes, divide
from megafp8.data.preprocessing.shares import ProgressFile, Share, ShareProgress, divide_tasks, owner, total_bytes
from megafp8.data.preprocessing.sources import find_sources
from megafp8.data.preprocessing.table_readers import find_dataset
from megafp8.data.preprocessing.workers import Worker, run_tasks, sample_texts
from megafp8.data.shards import (
    ShardManifest,
    bin_path,
    idx_path,
    load_manifest,
    manifest_path,
    save_manifest,
    token_dtype,
)
from megafp8.data.tokenizers.build import (
    AUTO,
    GIGATOKEN,
    build_tokenizer,
    describe_tokenizer,
    tokenizer_settings,
)
from megafp8.data.tokenizers.encoders import (
    EncoderChoice,
    EncoderMismatchError,
    LibraryEncoder,
    choose_encoder,
    lost_fraction,
)
from megafp8.errors import CapabilityError, DataError

# Below this size, comparing encoders takes as long as encoding everything with the library.
SMALL_INPUT_BYTES = 512 << 10
COMPRESSION_FACTOR = 10
SHOWN_PARTS = 10
SHOWN_LOSS = 0.001


@dataclass(frozen=True)
class PreprocessProgress:
    """Progress of a job. `num_tokens` counts all keys; bytes are those of the input on disk."""

    input_bytes: int
    total_bytes: int
    num_documents: int = 0
    num_tokens: int = 0
    num_skipped: int = 0

    def plus(self, record: PartRecord) -> "PreprocessProgress":
        """Return the progress after one more part."""
        return PreprocessProgress(
            self.input_bytes + record.input_bytes,
            self.total_bytes,
            self.num_documents + record.num_documents,
            self.num_tokens + sum(record.num_tokens),
            self.num_skipped + record.num_skipped,
        )


@dataclass(frozen=True)
class PreprocessSummary:
    """What a job made: prefix and manifest of each shard. `made` is False if the shards existed already."""

    shards: tuple[tuple[str, ShardManifest], ...]
    made: bool


def preprocess(
    job: PreprocessJob,
    on_progress: Callable[[PreprocessProgress], None] = lambda _: None,
    on_message: Callable[[str], None] = lambda _: None,
) -> PreprocessSummary:
    """Tokenize text into one shard per key, each complete or absent.

    Args:
        job: what to make.
        on_progress: called at the start, with what an earlier run left, and after each part.
        on_message: called with messages for the user: files that are left out, which encoder runs and why, and what is
            done again.

    Raises:
        ConfigError, CapabilityError: the tokenizer's flags, or a library that is not installed.
        DataError: inputs that cannot be read, other shards under the same prefix, or a worker that died.
        OSError: the output cannot be written.
    """
    return _JobRun(job, on_progress, on_message).run()


def make_share(
    job: PreprocessJob,
    share: Share,
    on_progress: Callable[[PreprocessProgress], None] = lambda _: None,
    on_message: Callable[[str], None] = lambda _: None,
) -> Union[ShareProgress, PreprocessSummary]:
    """Make the parts of one share of a job, in a folder that all machines see. Arguments and errors of `preprocess`.

    Returns:
        What the share has, or the shards if they are complete.

    Raises:
        DataError: as well for a job that was begun with another number of shares.
    """
    return _JobRun(job, on_progress, on_message).make_share(share)


def merge_shares(job: PreprocessJob, on_message: Callable[[str], None] = lambda _: None) -> PreprocessSummary:
    """Merge the parts of all shares into the shards. Arguments and errors of `preprocess`.

    Raises:
        DataError: as well if a share is not complete.
    """
    return _JobRun(job, lambda _: None, on_message).merge()


class _JobRun:
    """One run of a job, see `preprocess`."""

    def __init__(
        self,
        job: PreprocessJob,
        on_progress: Callable[[PreprocessProgress], None],
        on_message: Callable[[str], None],
    ):
        self.job, self.on_progress, self.on_message = job, on_progress, on_message
        if job.dataset:
            self.sources = [find_dataset(*job.dataset)]
        else:
            self.sources = find_sources(job.inputs, job.text_separator, on_message, job.max_document_bytes)
        self.total_bytes = sum(source.num_bytes for source in self.sources)
        self.tokenizer = build_tokenizer(job.tokenizer, job.vocab_size)
        self.dtype = token_dtype(self.tokenizer.vocab_size)
        self.folder = PartFolder(job.output_prefix, len(job.json_keys), self.dtype)
        description = {
            "sources": [source.describe() for source in self.sources],
            "tokenizer": self.tokenizer.unique_identifiers,
            "json_keys": job.json_keys,
            "append_eod": job.append_eod,
        }
        # Everything that decides the bytes of the shards, except for what is skipped, as it reads back from JSON.
        self.description = json.loads(json.dumps(description))

    def run(self) -> PreprocessSummary:
        if finished := self._find_finished():
            return finished
        with self.folder.lock():
            try:
                summary = self._make_shards()
            except BaseException:
                if not self.folder.holds_parts():
                    self.folder.remove()
                raise
            self.folder.remove()
        return summary

    def make_share(self, share: Share) -> Union[ShareProgress, PreprocessSummary]:
        if finished := self._find_finished():
            return finished
        with self.folder.lock(share.file_name, what=f"--part {share} is being made by another process in"):
            choice = self._announced_encoder((self.folder.load_job() or {}).get("refused", ""))
            lock, saved = self._join(share, choice)
            with lock:
                return self._make_tasks(share, choice, saved["part_bytes"])

    def merge(self) -> PreprocessSummary:
        if finished := self._find_finished():
            return finished
        if not self.folder.path.is_dir():
            raise DataError(f"{self.folder.path} does not exist: make the parts first, with --part 1/N to --part N/N.")
        with self.folder.lock():
            saved = self._load_own_job()
            if "num_shares" not in saved:
                raise DataError(
                    f"{self.folder.path} has no parts of --part I/N. The same command without --merge-parts makes the "
                    "shards on this machine."
                )
            self._drop_damaged(verdict="not used, because")
            units = divide(self.sources, self.job.json_keys, saved["part_bytes"])
            worker = Worker(self.job, self.sources, self.tokenizer, LibraryEncoder(self.tokenizer))
            shares = divide_tasks(units, self.sources, saved["num_shares"])
            missing = [
                str(Share(number, len(shares)))
                for number, tasks in enumerate(shares, 1)
                if any(worker.load_finished_task(task) is None for task in tasks)
            ]
            if missing:
                are, more = "is" if len(missing) == 1 else "are", len(missing) - SHOWN_PARTS
                shown = ", ".join(missing[:SHOWN_PARTS]) + (f" and {more} more" if more > 0 else "")
                raise DataError(
                    f"{self.folder.path}: part {shown} {are} not complete. Run the same command with --part "
                    f"{missing[0]} in place of --merge-parts, then merge again."
                )
            with ShardAssembly(units, self.sources, self.folder) as assembly:
                self._make_parts(worker, build_tasks(units, 1), assembly.add, self.total_bytes)
                self._check_tokens(assembly)
                summary = self._publish(saved["encoder"], assembly)
            self.folder.remove()
        return summary

    def _find_finished(self) -> Optional[PreprocessSummary]:
        """Return the shards if they are complete; None if there is something to do."""
        saved = self.folder.load_job()
        if self.job.overwrite or (saved or {}).get("job") == self.description:
            return None
        finished = self._load_finished()
        if finished is not None and self.folder.path.exists() and saved is None:
            with self.folder.lock():  # a run was killed while it deleted its parts
                self.folder.remove()
        return finished

    def _join(self, share: Share, choice: EncoderChoice) -> tuple[BinaryIO, dict[str, Any]]:
        """Take part in the job in the folder, or begin it. Returns the shared lock, and the content of job.json."""
        with self.folder.lock(SETUP_LOCK):
            saved = self.folder.load_job() or {}
            is_begun = saved.get("job") == self.description and saved.get("num_shares") == share.count
            lock = self.folder.lock(LOCK, shared=is_begun)
            try:
                if not is_begun:
                    saved = self._begin(share, choice)
                    fcntl.flock(lock, fcntl.LOCK_SH)
            except BaseException:
                lock.close()
                raise
        return lock, saved

    def _begin(self, share: Share, choice: EncoderChoice) -> dict[str, Any]:
        """Divide the job in the folder, which is locked, into shares. Returns the content of job.json."""
        saved = self._load_or_clear()
        if (count := saved.get("num_shares", share.count)) != share.count:
            raise DataError(
                f"{self.folder.path} is divided into {count} parts, not {share.count}: use --part I/{count}, delete "
                "it, or finish the job on this machine with the same command without --part."
            )
        part_bytes = choose_part_bytes(self.total_bytes, choice.encoder.part_bytes, share.count)
        saved = {"part_bytes": part_bytes} | saved | {"num_shares": share.count, "encoder": choice.encoder.name}
        self.folder.save_job(saved)
        return saved

    def _make_tasks(self, share: Share, choice: EncoderChoice, part_bytes: int) -> ShareProgress:
        units = divide(self.sources, self.job.json_keys, part_bytes)
        tasks = divide_tasks(units, self.sources, share.count)[share.number - 1]
        self._drop_damaged(owner(tasks))
        file = ProgressFile(self.folder, share)
        on_progress = self.on_progress

        def report(progress: PreprocessProgress) -> None:
            on_progress(progress)
            file.write(ShareProgress(**asdict(progress)))

        self.on_progress = report
        worker = Worker(self.job, self.sources, self.tokenizer, choice.encoder)
        try:
            self._make_parts(worker, tasks, lambda *_: None, total_bytes(tasks, self.sources))
        except EncoderMismatchError as error:
            raise CapabilityError(
                f"gigatoken cannot be used: {error}. Delete {self.folder.path}, and make all parts with --encoder "
                "library."
            ) from error
        return file.complete()

    def _make_shards(self) -> PreprocessSummary:
        """Make the shards from the parts in the locked folder and those that are missing."""
        saved = self._load_or_clear()
        self._drop_damaged()
        choice = self._announced_encoder(saved["refused"])
        saved.setdefault("part_bytes", choose_part_bytes(self.total_bytes, choice.encoder.part_bytes))
        self.folder.save_job(saved)
        units = divide(self.sources, self.job.json_keys, saved["part_bytes"])
        worker = Worker(self.job, self.sources, self.tokenizer, choice.encoder)
        try:
            with ShardAssembly(units, self.sources, self.folder) as assembly:
                self._make_parts(worker, build_tasks(units, 1), assembly.add, self.total_bytes)
                self._check_tokens(assembly)
                return self._publish(choice.encoder.name, assembly)
        except EncoderMismatchError as error:
            if self.job.encoder == GIGATOKEN:
                raise CapabilityError(f"--encoder gigatoken cannot be used: {error}") from error
            self.folder.clear()
            refused = f"gigatoken is not used, and the job starts over: {error}"
            self.folder.save_job({"job": self.description, "refused": refused})
            return self._make_shards()

    def _load_or_clear(self) -> dict[str, Any]:
        """Return the content of job.json; delete the parts of another job if --overwrite was given.

        Its keys are `job`, the description; `refused`, why gigatoken was given up; `part_bytes`, if there are parts;
        and `num_shares` and `encoder`, if the job is divided between machines.
        """
        saved = self.folder.load_job()
        if saved is not None and (saved.get("job") == self.description or not self.job.overwrite):
            return self._load_own_job()
        self.folder.clear()
        return {"job": self.description, "refused": ""}

    def _load_own_job(self) -> dict[str, Any]:
        """Return the content of job.json.

        Raises:
            DataError: there is none, or it is another job's.
        """
        saved = self.folder.load_job() or {}
        found = saved.get("job", {})
        other = [name.replace("_", " ") for name, value in self.description.items() if found.get(name) != value]
        if other:
            changed = _first_change(found.get("sources", []), self.description["sources"])
            changed = f" ({changed})" if changed else ""
            raise DataError(
                f"{self.folder.path} has an unfinished job with different {' and '.join(other)}{changed}. Run that "
                "command again to finish it, choose another --output-prefix, or use --overwrite to discard it."
            )
        return saved

    def _drop_damaged(self, owns: Callable[[str], bool] = lambda _: True, verdict: str = "made again, because") -> None:
        """Compare the finished parts of these names with their hashes, and forget those that differ."""
        names = list(filter(owns, self.folder.part_names()))
        if names:
            self.on_message(f"reading the finished parts in {self.folder.path}, to compare their SHA-256")
        checks = run_tasks(lambda name: [(name, self.folder.is_whole(name))], names, self.job.workers)
        if damaged := sorted(name for name, is_whole in checks if not is_whole):
            for name in damaged:
                self.folder.drop(name)
            shown = ", ".join(damaged[:SHOWN_PARTS]) + (", ..." if len(damaged) > SHOWN_PARTS else "")
            parts = "1 part" if len(damaged) == 1 else f"{len(damaged)} parts"
            self.on_message(f"{verdict} damaged or of an earlier version in {self.folder.path}: {parts} ({shown})")

    def _check_tokens(self, assembly: ShardAssembly) -> None:
        if assembly.num_tokens == 0:
            self.folder.clear()
            skipped = f", {assembly.num_skipped} records skipped" if assembly.num_skipped else ""
            raise DataError(f"--input has no text: {len(self.sources)} files, 0 tokens{skipped}.")

    def _announced_encoder(self, refused: str) -> EncoderChoice:
        """Choose the encoder, and say which and why, what is off in the tokenizer, and what it loses."""
        sample = sample_texts(self.sources, self.job.json_keys)
        choice = self._choose_encoder(refused, sample)
        self.on_message(f"tokenizing with {choice.encoder.name}: {choice.reason}")
        self._warn(sample)
        return choice

    def _warn(self, sample: Sequence[str]) -> None:
        """Say what was turned off in the tokenizer, and which fraction of the text it loses."""
        for warning in self.tokenizer.warnings:
            self.on_message(warning)
        if (lost := lost_fraction(self.tokenizer, sample)) >= SHOWN_LOSS:
            self.on_message(
                f"warning: the tokenizer loses {lost:.1%} of the characters of a sample of the text: decoding its ids "
                "does not return them"
            )

    def _choose_encoder(self, refused: str, sample: Sequence[str]) -> EncoderChoice:
        job, tokenizer = self.job, self.tokenizer
        if job.encoder == AUTO and refused:
            return EncoderChoice(LibraryEncoder(tokenizer), refused)
        text_bytes = sum(
            source.num_bytes * (COMPRESSION_FACTOR if source.compression or source.is_table else 1)
            for source in self.sources
        )
        if job.encoder == AUTO and text_bytes < SMALL_INPUT_BYTES:
            return EncoderChoice(LibraryEncoder(tokenizer), "the input is small")
        return choose_encoder(tokenizer, job.encoder, sample)

    def _make_parts(
        self,
        worker: Worker,
        tasks: Sequence[InputTask],
        add: Callable[[str, Optional[PartRecord]], None],
        num_bytes: int,
    ) -> None:
        """Make the parts that do not exist, and give all parts to `add`.

        Raises:
            DataError: what `Worker` raises, or a process that died.
        """
        progress = PreprocessProgress(0, num_bytes)
        missing: list[InputTask] = []
        for task in tasks:
            finished = worker.load_finished_task(task)
            if finished is None:
                missing.append(task)
            for name, record in finished or ():
                add(name, record)
                progress = progress if record is None else progress.plus(record)
        self.on_progress(progress)
        workers = self.job.workers
        for name, record in run_tasks(worker, build_tasks(missing, workers), workers):
            add(name, record)
            if record is not None:
                progress = progress.plus(record)
                self.on_progress(progress)

    def _publish(self, encoder: str, assembly: ShardAssembly) -> PreprocessSummary:
        """Publish the shards, each with its manifest last."""
        job, prefixes = self.job, [self.job.shard_prefix(key) for key in self.job.json_keys]
        for path in map(manifest_path, prefixes):
            path.unlink(missing_ok=True)
            for abandoned in path.parent.glob(f".{escape(path.name)}.*.tmp"):  # by a run that was killed in writing it
                abandoned.unlink(missing_ok=True)
        all_totals = assembly.publish(job.output_prefix, prefixes)
        shards = []
        for key, prefix, totals in zip(job.json_keys, prefixes, all_totals, strict=True):
            manifest = ShardManifest(
                tokenizer=self.description["tokenizer"],
                json_key=key,
                append_eod=job.append_eod,
                dtype=self.dtype.name,
                sources=self.description["sources"],
                tokenizer_settings=tokenizer_settings(job.tokenizer, job.vocab_size),
                encoder=encoder,
                num_skipped=assembly.num_skipped,
                **asdict(totals),
            )
            save_manifest(prefix, manifest)
            shards.append((prefix, manifest))
        return PreprocessSummary(tuple(shards), made=True)

    def _load_finished(self) -> Optional[PreprocessSummary]:
        """Return the shards of an earlier run with the same inputs and settings; None if one is missing.

        Raises:
            DataError: there are other shards.
        """
        shards = []
        for prefix in map(self.job.shard_prefix, self.job.json_keys):
            if not (bin_path(prefix).exists() or idx_path(prefix).exists()):
                continue
            manifest = load_manifest(prefix)
            difference = self._describe_difference(prefix, manifest)
            if difference or manifest is None:
                raise DataError(
                    f"{prefix} already exists, but {difference}. Choose another --output-prefix, or use --overwrite."
                )
            shards.append((prefix, manifest))
        # With shards for only some of the keys, keys were added: all are made again.
        return PreprocessSummary(tuple(shards), made=False) if len(shards) == len(self.job.json_keys) else None

    def _describe_difference(self, prefix: str, manifest: Optional[ShardManifest]) -> str:
        """Say how a shard differs from what the job asks for; an empty text if it does not."""
        tokenizer, sources = self.description["tokenizer"], self.description["sources"]
        if manifest is None:
            return f"without its manifest {manifest_path(prefix)}"
        if manifest.tokenizer != tokenizer:
            found = "an unknown one" if manifest.tokenizer is None else describe_tokenizer(manifest.tokenizer)
            return f"with the tokenizer {found} instead of {describe_tokenizer(tokenizer)}"
        if manifest.append_eod != self.job.append_eod:
            return f"{'with' if manifest.append_eod else 'without'} --append-eod"
        if manifest.num_skipped and not self.job.skip_bad:
            return f"with {manifest.num_skipped} records skipped (--on-bad-document skip)"
        files = {"tokens": (bin_path(prefix), manifest.bin_bytes), "index": (idx_path(prefix), manifest.idx_bytes)}
        for name, (path, expected) in files.items():
            num_bytes = path.stat().st_size if path.exists() else 0
            if num_bytes != expected:
                return f"its {name} file {path} has {num_bytes} bytes instead of {expected}"
        return _first_change(manifest.sources, sources)


def _first_change(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> str:
    """Say in what sources differ from earlier ones; an empty text if they do not."""
    if len(before) != len(now):
        return f"from {len(before)} input files instead of {len(now)}"
    for earlier, source in zip(before, now, strict=True):
        # Paths are not compared, since the folder may have moved. Nor are the hashes that older versions wrote.
        if any(earlier.get(name) != source.get(name) for name in ("bytes", "mtime_ns", "separator", "fingerprint")):
            return f"from {_describe_source(earlier)} instead of {_describe_source(source)}"
    return ""


def _describe_source(source: dict[str, Any]) -> str:
    written = datetime.fromtimestamp(source["mtime_ns"] / 1e9).isoformat(" ", "milliseconds")
    separator = f", documents separated by {source['separator']!r}" if "separator" in source else ""
    return f"{source['path']} ({source['bytes']} bytes, written {written}{separator})"
