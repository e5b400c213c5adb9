"""What a worker of preprocessing does: read a part, take the texts out, encode them in batches, write the part file.

Memory of a worker: a batch of texts and their ids (`Encoder.batch_bytes`, about ten times that in all), a block of
input, the longest document, and the encoder itself.

Processes that work on tasks and send back results as they have them.

What concurrent.futures lacks for hours of work: a task gives many results, a worker whose parent is killed ends by
itself (its pipe breaks), and one that is killed is an error at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Optional, TypeVar, Union

import numpy as np

from megafp8.config.schema import DataConfig
from megafp8.data.preprocessing.documents import Documents, parse_records, read_documents
from megafp8.data.preprocessing.part_files import PartFolder, PartRecord, PartWriter
from megafp8.data.preprocessing.plan import InputPart, InputTask, Stripe, divide
from megafp8.data.preprocessing.readers import DamagedFileError, InputSource, read_blocks, records_before
from megafp8.data.preprocessing.table_readers import rows_before
from megafp8.data.shards import token_dtype
from megafp8.data.tokenizers.build import Tokenizer, build_tokenizer
from megafp8.data.tokenizers.encoders import (
    Encoder,
    EncoderMismatchError,
    build_encoder,
    encode_documents,
    refused_texts,
)
from megafp8.errors import DataError

# Records of a large block that are parsed at a time.
PARSED_RECORDS = 1024
# What encoders are compared on before a job.
SAMPLED_PLACES, SAMPLED_BYTES, SAMPLED_TEXTS, SAMPLED_CHARACTERS = 16, 16 << 10, 16, 4000


@dataclass(frozen=True)
class WorkSettings:
    """What a worker needs to know of the job.

    Attributes:
        sources: the input.
        json_keys: of the texts.
        tokenizer, vocab_size: see `build_tokenizer`.
        encoder: GIGATOKEN or LIBRARY.
        append_eod: end each document with the end-of-document token.
        skip_bad: skip records that are no documents; else the first is an error.
        output_prefix: of the job.
    """

    sources: tuple[InputSource, ...]
    json_keys: tuple[str, ...]
    tokenizer: DataConfig
    vocab_size: Optional[int]
    encoder: str
    append_eod: bool
    skip_bad: bool
    output_prefix: str


@dataclass(frozen=True)
class FinishedPart:
    """A part that is whole, made now or by an earlier run."""

    name: str
    record: PartRecord


@dataclass(frozen=True)
class FinishedStripe:
    """The end of a stream's stripe, and how many parts the stream has."""

    stream_name: str
    num_parts: int


class Worker:
    """Makes the parts of tasks. Forked workers inherit tokenizer and encoder; one that is pickled builds its own.

    Args:
        settings: of the job.
        tokenizer, encoder: those that the settings name; default, they are built here.
    """

    def __init__(
        self, settings: WorkSettings, tokenizer: Optional[Tokenizer] = None, encoder: Optional[Encoder] = None
    ):
        self.settings = settings
        self.tokenizer = tokenizer or build_tokenizer(settings.tokenizer, settings.vocab_size)
        self.encoder = encoder or build_encoder(self.tokenizer, settings.encoder)
        self.folder = PartFolder(
            settings.output_prefix, len(settings.json_keys), token_dtype(self.tokenizer.vocab_size)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Worker, (self.settings,)

    def __call__(self, task: InputTask) -> Iterator[Union[FinishedPart, FinishedStripe]]:
        """Make the parts of a task that are not there yet.

        Raises:
            DataError: a record that is no document, unless they are skipped; with file and number of the line.
            EncoderMismatchError: gigatoken gives other ids than the tokenizer's library.
            OSError: the part cannot be written.
        """
        if isinstance(task, InputPart):
            yield FinishedPart(task.name, _encode_part(self, task))
        else:
            yield from _encode_stripe(self, task)

    def finished_before(self, name: str) -> Optional[PartRecord]:
        """Return the record of a part that an earlier run made, if it is of use to this one."""
        record = self.folder.load_record(name)
        return None if record is None or (record.num_skipped and not self.settings.skip_bad) else record


def _encode_part(worker: Worker, part: InputPart) -> PartRecord:
    settings = worker.settings
    first_pieces = {piece.source: piece for piece in reversed(part.pieces)}

    def count_before(source_number: int) -> int:
        source, start = settings.sources[source_number], first_pieces[source_number].start
        if source.is_table:
            return rows_before(source, start)
        return records_before(source, start) if source.is_divisible else 0

    with PartWriter(worker.folder, part.name) as writer:
        encoder = _PartEncoder(worker, writer, count_before)
        for piece in part.pieces:
            source = settings.sources[piece.source]
            try:
                first = writer.num_records(piece.source)
                for documents in read_documents(source, settings.json_keys, piece.start, piece.stop, first):
                    encoder.add(piece.source, documents)
            except DamagedFileError as error:
                encoder.refuse_rest(piece.source, writer.num_records(piece.source), str(error))
        encoder.flush()
        return writer.finish(sum(piece.input_bytes for piece in part.pieces))


def _encode_stripe(worker: Worker, stripe: Stripe) -> Iterator[Union[FinishedPart, FinishedStripe]]:
    stream, source = stripe.stream, worker.settings.sources[stripe.stream.source]
    num_parts = num_records = 0

    def encode(records: Sequence[bytes], input_bytes: int, damage: str) -> Iterator[FinishedPart]:
        name = stream.part_name(num_parts)
        if num_parts % stripe.count != stripe.number:
            return
        record = worker.finished_before(name)
        if record is not None:
            yield FinishedPart(name, record)
            return
        with PartWriter(worker.folder, name) as writer:
            encoder = _PartEncoder(worker, writer, lambda _: num_records)
            for first in range(0, len(records), PARSED_RECORDS):
                some = records[first : first + PARSED_RECORDS]
                encoder.add(stream.source, parse_records(source, some, first, worker.settings.json_keys))
            if damage:
                encoder.refuse_rest(stream.source, len(records), damage)
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
    """Gathers documents of a part into batches, encodes and writes them.

    Args:
        worker: that does it.
        writer: of the part. Records are numbered from 0 for each of its files.
        count_before: how many records of a file, given by its number, there are before the part.
    """

    def __init__(self, worker: Worker, writer: PartWriter, count_before: Callable[[int], int]):
        self._worker, self._writer, self._count_before = worker, writer, count_before
        self._columns: list[list[str]] = [[] for _ in worker.settings.json_keys]
        self._places: list[tuple[int, Sequence[int]]] = []
        self._batch_size = 0

    def add(self, source: int, documents: Documents) -> None:
        """Add documents of a file, given by its number."""
        for number, reason in documents.bad:
            self.refuse(source, number, reason)
        self._writer.count_records(source, documents.num_records)
        for column, texts in zip(self._columns, documents.columns, strict=True):
            column.extend(texts)
            self._batch_size += sum(map(len, texts))
        self._places.append((source, documents.numbers))
        if self._batch_size >= self._worker.encoder.batch_bytes:
            self.flush()

    def refuse(self, source: int, number: int, reason: str) -> None:
        """Skip a record, or stop at it."""
        if self._worker.settings.skip_bad:
            self._writer.skip(source, number, reason)
            return
        found = self._worker.settings.sources[source]
        raise DataError(
            f"{found.path} {found.record_name} {self._count_before(source) + number + 1}: {reason}. "
            "(--on-bad-document skip leaves out such, and counts them.)"
        )

    def refuse_rest(self, source: int, number: int, damage: str) -> None:
        """Skip all records of a file from a number on, as one, or stop."""
        self.refuse(source, number, f"the rest of the file is damaged: {damage}")

    def flush(self) -> None:
        """Encode and write what was gathered."""
        try:
            shards = [self._encode(texts) for texts in self._columns]
        except DataError:
            self._drop_refused()
            shards = [self._encode(texts) for texts in self._columns]
        except EncoderMismatchError as error:
            paths = dict.fromkeys(self._worker.settings.sources[source].path for source, _ in self._places)
            raise EncoderMismatchError(f"in {', '.join(paths)}: {error}") from error
        self._writer.add(shards)
        self._columns = [[] for _ in self._columns]
        self._places, self._batch_size = [], 0

    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return encode_documents(self._worker.encoder, texts, **self._shard_options())

    def _shard_options(self) -> dict[str, Any]:
        vocab_size = self._worker.tokenizer.vocab_size
        eod = self._worker.tokenizer.eod if self._worker.settings.append_eod else None
        return {"vocab_size": vocab_size, "dtype": token_dtype(vocab_size), "eod": eod}

    def _drop_refused(self) -> None:
        """Refuse the documents of which the tokenizer refuses a text."""
        refused: dict[int, str] = {}
        for texts in self._columns:
            refused = refused_texts(self._worker.encoder, texts, **self._shard_options()) | refused
        places = [(source, number) for source, numbers in self._places for number in numbers]
        for number in sorted(refused):
            self.refuse(*places[number], refused[number])
        self._columns = [
            [text for number, text in enumerate(texts) if number not in refused] for texts in self._columns
        ]


def sample_texts(sources: Sequence[InputSource], keys: Sequence[str]) -> list[str]:
    """Return texts from evenly spread places of the input, for comparing encoders: about 256 KiB, each text cut."""
    total_bytes = sum(source.num_bytes for source in sources)
    texts: list[str] = []
    for unit in divide(sources, keys, max(total_bytes // SAMPLED_PLACES, SAMPLED_BYTES)):
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


Task = TypeVar("Task")
Result = TypeVar("Result")
# Tasks that a worker has at hand, so that it does not wait for the parent between two.
TASKS_AHEAD = 2


class WorkerDiedError(Exception):
    """A worker ended without a word. The text says how."""


def run_tasks(work: Callable[[Task], Iterator[Result]], tasks: Sequence[Task], workers: int) -> Iterator[Result]:
    """Yield everything that `work` yields for the tasks, as it comes: in order only with one worker.

    Args:
        work: called once a task. With several workers it runs in processes forked from this one (spawned where fork is
            not safe, on macOS); tasks, results and exceptions are pickled.
        tasks: handed out in order.
        workers: processes; 1 works in this process.

    Raises:
        WorkerDiedError: a worker was killed.
        Exception: what `work` raises. The other workers are stopped.
    """
    workers = min(workers, len(tasks))
    if workers <= 1:
        for task in tasks:
            yield from work(task)
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool: dict[Connection, Any] = {}
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            # A forked worker has the ends of the workers before it, which would keep their pipes from breaking.
            inherited = [*pool, ours] if context.get_start_method() == "fork" else []
            process = context.Process(target=_serve, args=(work, theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            pool[ours] = process
        yield from _collect(pool, list(tasks))
    finally:
        for connection, process in pool.items():
            connection.close()
            process.terminate()
            process.join()


def _collect(pool: dict[Connection, Any], tasks: list[Any]) -> Iterator[Any]:
    tasks.reverse()
    at_hand = dict.fromkeys(pool, 0)

    def hand_out(connection: Connection) -> None:
        # Near the end nothing is put by, lest one worker has two tasks and another none.
        while tasks and (not at_hand[connection] or (at_hand[connection] < TASKS_AHEAD and len(tasks) > len(pool))):
            try:
                connection.send(tasks.pop())
            except BrokenPipeError as error:
                raise WorkerDiedError(_describe_end(pool[connection])) from error
            at_hand[connection] += 1

    for connection in pool:
        hand_out(connection)
    while any(at_hand.values()):
        for connection in wait([connection for connection, count in at_hand.items() if count]):
            try:
                kind, content = connection.recv()
            except (EOFError, ConnectionResetError) as error:
                raise WorkerDiedError(_describe_end(pool[connection])) from error
            if kind == "raised":
                raise content
            if kind == "done":
                at_hand[connection] -= 1
                hand_out(connection)
            else:
                yield content


def _serve(work: Callable[[Any], Iterator[Any]], connection: Connection, inherited: list[Connection]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent stops its workers
    # One process a core is all the parallelism there is to have; `tokenizers` would start its threads on top.
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


def _describe_end(process: Any) -> str:
    process.join(timeout=10)
    code = process.exitcode
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}"
