"""Workers of preprocessing: each reads a part, extracts the texts, encodes them in batches and writes the part file.

Memory of a worker: one batch of texts and their ids (about ten times `Encoder.batch_bytes`), one block of input, the
longest document and the encoder.

`run_tasks` is the process pool. In contrast to concurrent.futures, a task can yield many results, a worker whose parent
is killed exits because its pipe breaks, and a worker that is killed is an error at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext
from typing import TYPE_CHECKING, Any, Optional, TypeVar, Union

from megafp8.data.preprocessing.documents import Documents, parse_records, read_documents
from megafp8.data.preprocessing.part_files import PartFolder, PartRecord, PartWriter
from megafp8.data.preprocessing.plan import InputPart, InputTask, Stripe, divide
from megafp8.data.preprocessing.readers import DamagedFileError, read_blocks, records_before
from megafp8.data.preprocessing.sources import InputSource
from megafp8.data.preprocessing.table_readers import rows_before
from megafp8.data.shards import token_dtype
from megafp8.data.tokenizers.build import Tokenizer, build_tokenizer
from megafp8.data.tokenizers.encoders import (
    Encoder,
    EncoderMismatchError,
    build_encoder,
    encode_documents,
    rejected_texts,
)
from megafp8.errors import DataError

if TYPE_CHECKING:
    from megafp8.data.preprocessing.plan import PreprocessJob

# Records of a large block that are parsed at a time.
PARSED_RECORDS = 1024
# Size of the sample on which encoders are compared.
SAMPLED_POSITIONS, SAMPLED_BYTES, SAMPLED_TEXTS, SAMPLED_CHARACTERS = 16, 16 << 10, 16, 4000
# Tasks that a worker has queued, so that it does not wait for the parent between two tasks.
QUEUED_TASKS = 2

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class FinishedPart:
    """A complete part, made now or by an earlier run."""

    name: str
    record: PartRecord


@dataclass(frozen=True)
class FinishedStripe:
    """The end of a stripe, and the number of parts of its stream."""

    stream_name: str
    num_parts: int


class Worker:
    """Makes the parts of tasks. Forked workers inherit tokenizer and encoder; a pickled one builds its own.

    Args:
        job: the job.
        sources: the input.
        encoder_kind: GIGATOKEN or LIBRARY.
        tokenizer, encoder: those that `job` and `encoder_kind` stand for; None builds them here.
    """

    def __init__(
        self,
        job: PreprocessJob,
        sources: Sequence[InputSource],
        encoder_kind: str,
        tokenizer: Optional[Tokenizer] = None,
        encoder: Optional[Encoder] = None,
    ):
        self.job, self.sources, self._encoder_kind = job, sources, encoder_kind
        self.tokenizer = tokenizer or build_tokenizer(job.tokenizer, job.vocab_size)
        self.encoder = encoder or build_encoder(self.tokenizer, encoder_kind)
        vocab_size, dtype = self.tokenizer.vocab_size, token_dtype(self.tokenizer.vocab_size)
        self.folder = PartFolder(job.output_prefix, len(job.json_keys), dtype)
        eod = self.tokenizer.eod if job.append_eod else None
        self.shard_options: dict[str, Any] = {"vocab_size": vocab_size, "dtype": dtype, "eod": eod}

    def __reduce__(self) -> tuple[Any, ...]:
        return Worker, (self.job, self.sources, self._encoder_kind)

    def __call__(self, task: InputTask) -> Iterator[Union[FinishedPart, FinishedStripe]]:
        """Make the parts of a task that do not exist yet.

        Raises:
            DataError: a record that is no document, unless they are skipped, with file and line number.
            EncoderMismatchError: gigatoken gives other ids than the tokenizer's library.
            OSError: the part cannot be written.
        """
        if isinstance(task, InputPart):
            yield FinishedPart(task.name, _encode_part(self, task))
        else:
            yield from _encode_stripe(self, task)

    def load_finished(self, name: str) -> Optional[PartRecord]:
        """Return the record of a part that an earlier run made, if this job can use it."""
        record = self.folder.load_record(name)
        return None if record is None or (record.num_skipped and not self.job.skip_bad) else record


def _encode_part(worker: Worker, part: InputPart) -> PartRecord:
    first_pieces = {piece.source: piece for piece in reversed(part.pieces)}

    def count_before(source_number: int) -> int:
        source, start = worker.sources[source_number], first_pieces[source_number].start
        if source.is_table:
            return rows_before(source, start)
        return records_before(source, start) if source.is_divisible else 0

    with PartWriter(worker.folder, part.name) as writer:
        encoder = _PartEncoder(worker, writer, count_before)
        for piece in part.pieces:
            source = worker.sources[piece.source]
            try:
                first = writer.num_records(piece.source)
                for documents in read_documents(source, worker.job.json_keys, piece.start, piece.stop, first):
                    encoder.add(piece.source, documents)
            except DamagedFileError as error:
                encoder.reject_rest(piece.source, writer.num_records(piece.source), str(error))
        encoder.flush()
        return writer.finish(sum(piece.input_bytes for piece in part.pieces))


def _encode_stripe(worker: Worker, stripe: Stripe) -> Iterator[Union[FinishedPart, FinishedStripe]]:
    stream, source = stripe.stream, worker.sources[stripe.stream.source]
    num_parts = num_records = 0

    def encode(records: Sequence[bytes], input_bytes: int, damage: str) -> Iterator[FinishedPart]:
        name = stream.part_name(num_parts)
        if num_parts % stripe.count != stripe.number:
            return
        record = worker.load_finished(name)
        if record is not None:
            yield FinishedPart(name, record)
            return
        with PartWriter(worker.folder, name) as writer:
            encoder = _PartEncoder(worker, writer, lambda _: num_records)
            for first in range(0, len(records), PARSED_RECORDS):
                chunk = records[first : first + PARSED_RECORDS]
                encoder.add(stream.source, parse_records(source, chunk, first, worker.job.json_keys))
            if damage:
                encoder.reject_rest(stream.source, len(records), damage)
            encoder.flush()
            yield FinishedPart(name, writer.finish(input_bytes))

    damage = ""
    try:
        for input_bytes, records in read_blocks(source, stream.block_bytes):
            yield from encode(records, input_bytes, "")
            num_parts, num_records = num_parts + 1, num_records + len(records)
    except DamagedFileError as error:
        damage = str(error)
    if damage:
        yield from encode([], 0, damage)
        num_parts += 1
    yield FinishedStripe(stream.name, num_parts)


class _PartEncoder:
    """Collects documents of a part into batches, encodes them and writes them.

    Args:
        worker: the worker that makes the part.
        writer: writer of the part. The records of each of its files are numbered from 0.
        count_before: returns how many records of a file, given by its number, come before the part.
    """

    def __init__(self, worker: Worker, writer: PartWriter, count_before: Callable[[int], int]):
        self._worker, self._writer, self._count_before = worker, writer, count_before
        self._reset()

    def _reset(self) -> None:
        self._columns: list[list[str]] = [[] for _ in self._worker.job.json_keys]
        self._positions: list[tuple[int, Sequence[int]]] = []
        self._batch_size = 0

    def add(self, source: int, documents: Documents) -> None:
        """Add documents of a file, given by its number."""
        for number, reason in documents.bad:
            self.reject(source, number, reason)
        self._writer.count_records(source, documents.num_records)
        for column, texts in zip(self._columns, documents.columns, strict=True):
            column.extend(texts)
            self._batch_size += sum(map(len, texts))
        self._positions.append((source, documents.numbers))
        if self._batch_size >= self._worker.encoder.batch_bytes:
            self.flush()

    def reject(self, source: int, number: int, reason: str) -> None:
        """Skip a record, or raise."""
        if self._worker.job.skip_bad:
            self._writer.skip(source, number, reason)
            return
        found = self._worker.sources[source]
        raise DataError(
            f"{found.path} {found.record_name} {self._count_before(source) + number + 1}: {reason}. (--on-bad-document "
            "skip skips and counts such records.)"
        )

    def reject_rest(self, source: int, number: int, damage: str) -> None:
        """Skip all records of a file from a number on, as one record, or raise."""
        self.reject(source, number, f"the rest of the file is damaged: {damage}")

    def flush(self) -> None:
        """Encode and write the batch."""
        try:
            shards = self._encode()
        except DataError:
            self._drop_rejected()
            shards = self._encode()
        except EncoderMismatchError as error:
            paths = dict.fromkeys(self._worker.sources[source].path for source, _ in self._positions)
            raise EncoderMismatchError(f"in {', '.join(paths)}: {error}") from error
        self._writer.add(shards)
        self._reset()

    def _encode(self) -> list[tuple[Any, Any]]:
        worker = self._worker
        return [encode_documents(worker.encoder, texts, **worker.shard_options) for texts in self._columns]

    def _drop_rejected(self) -> None:
        """Reject the documents of which the tokenizer rejects a text."""
        rejected: dict[int, str] = {}
        for texts in self._columns:
            rejected = rejected_texts(self._worker.encoder, texts, **self._worker.shard_options) | rejected
        positions = [(source, number) for source, numbers in self._positions for number in numbers]
        for index in sorted(rejected):
            self.reject(*positions[index], rejected[index])
        self._columns = [[text for index, text in enumerate(texts) if index not in rejected] for texts in self._columns]


def sample_texts(sources: Sequence[InputSource], keys: Sequence[str]) -> list[str]:
    """Return texts from evenly spread places of the input, on which encoders are compared: truncated, about 256 KiB."""
    total_bytes = sum(source.num_bytes for source in sources)
    texts: list[str] = []
    for unit in divide(sources, keys, max(total_bytes // SAMPLED_POSITIONS, SAMPLED_BYTES)):
        if isinstance(unit, InputPart):
            piece = unit.pieces[0]
            source = sources[piece.source]
            stop = min(piece.start + SAMPLED_BYTES, piece.stop) if source.is_divisible else piece.stop
            blocks = read_documents(source, keys, piece.start, stop)
        else:
            source = sources[unit.source]
            blocks = (parse_records(source, records, 0, keys) for _, records in read_blocks(source, SAMPLED_BYTES))
        try:
            columns = next(blocks).columns
        except (StopIteration, DamagedFileError):
            continue
        for column in columns:
            texts += [text[:SAMPLED_CHARACTERS] for text in column[:SAMPLED_TEXTS]]
    return texts


class WorkerDiedError(Exception):
    """A worker process ended without an exception of its own. The text says how."""


def run_tasks(work: Callable[[Task], Iterator[Result]], tasks: Sequence[Task], workers: int) -> Iterator[Result]:
    """Yield everything that `work` yields for the tasks, as it comes: in order only with one worker.

    Args:
        work: called once per task. With several workers it runs in processes forked from this one (spawned where fork
            is not safe, on macOS); tasks, results and exceptions are pickled.
        tasks: handed out in order.
        workers: number of processes; 1 works in this process.

    Raises:
        WorkerDiedError: a worker was killed.
        Exception: what `work` raises. The other workers are stopped.
    """
    workers = min(workers, len(tasks))
    if workers <= 1:
        for task in tasks:
            yield from work(task)
        return
    is_forking = sys.platform == "linux"
    context: Union[ForkContext, SpawnContext] = (
        multiprocessing.get_context("fork") if is_forking else multiprocessing.get_context("spawn")
    )
    pool: dict[Connection, Any] = {}
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            # A forked worker inherits the parent's ends of all pipes so far. Open, they would keep the pipes alive.
            inherited = [*pool, ours] if is_forking else []
            process = context.Process(target=_worker_main, args=(work, theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            pool[ours] = process
        yield from _dispatch(pool, list(tasks))
    finally:
        for connection, process in pool.items():
            connection.close()
            process.terminate()
            process.join()


def _dispatch(pool: dict[Connection, Any], tasks: list[Any]) -> Iterator[Any]:
    """Send the tasks to the workers, and yield their results."""
    tasks.reverse()
    num_queued = dict.fromkeys(pool, 0)

    def send_tasks(connection: Connection) -> None:
        # Near the end a worker gets one task at a time, so that none has two while another has none.
        while tasks and (
            not num_queued[connection] or (num_queued[connection] < QUEUED_TASKS and len(tasks) > len(pool))
        ):
            try:
                connection.send(tasks.pop())
            except BrokenPipeError as error:
                raise WorkerDiedError(_describe_exit(pool[connection])) from error
            num_queued[connection] += 1

    for connection in pool:
        send_tasks(connection)
    while any(num_queued.values()):
        for ready in wait([connection for connection, count in num_queued.items() if count]):
            assert isinstance(ready, Connection)
            try:
                kind, content = ready.recv()
            except (EOFError, ConnectionResetError) as error:
                raise WorkerDiedError(_describe_exit(pool[ready])) from error
            if kind == "raised":
                raise content
            if kind == "done":
                num_queued[ready] -= 1
                send_tasks(ready)
            else:
                yield content


def _worker_main(work: Callable[[Any], Iterator[Any]], connection: Connection, inherited: list[Connection]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent stops its workers
    # There is one process per core already; the library `tokenizers` would start threads on top.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for other in inherited:
        other.close()
    while True:
        try:
            task = connection.recv()
        except (EOFError, ConnectionResetError):
            return  # the parent is gone
        try:
            for result in work(task):
                connection.send(("result", result))
            connection.send(("done", None))
        except BrokenPipeError:
            return
        except Exception as error:
            connection.send(("raised", error))
            return


def _describe_exit(process: Any) -> str:
    process.join(timeout=10)
    code = process.exitcode
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}"
