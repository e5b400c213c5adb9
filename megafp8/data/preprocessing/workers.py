"""Workers of preprocessing: each reads a part, extracts the texts, encodes them in batches and writes the part file.

Memory of a worker: one batch of texts and their ids (about ten times `Encoder.batch_bytes`), one block of input, the
longest document and the encoder.

`run_tasks` is the process pool. In contrast to concurrent.futures, a task can yield many results, and the signal that
killed a worker is known.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Optional, TypeVar

from megafp8.data.preprocessing.documents import Documents, parse_records, read_documents
from megafp8.data.preprocessing.part_files import PartFolder, PartRecord, PartWriter
from megafp8.data.preprocessing.plan import InputPart, InputTask, PreprocessJob, Stripe, divide
from megafp8.data.preprocessing.readers import DamagedFileError, read_blocks, records_before
from megafp8.data.preprocessing.sources import InputSource
from megafp8.data.preprocessing.table_readers import rows_before
from megafp8.data.shards import token_dtype
from megafp8.data.tokenizers.build import Tokenizer
from megafp8.data.tokenizers.encoders import Encoder, EncoderMismatchError, encode_documents, rejected_texts
from megafp8.errors import DataError
from megafp8.utils.process import set_worker_death_signal

# Records of a large block that are parsed at a time.
PARSED_RECORDS = 1024
# Size of the sample on which encoders are compared.
SAMPLED_POSITIONS, SAMPLED_BYTES, SAMPLED_TEXTS, SAMPLED_CHARACTERS = 16, 16 << 10, 16, 4000

Task = TypeVar("Task")
Result = TypeVar("Result")


class Worker:
    """Makes the parts of tasks.

    Args:
        job: the job.
        sources: the input.
        tokenizer, encoder: the job's.
    """

    def __init__(self, job: PreprocessJob, sources: Sequence[InputSource], tokenizer: Tokenizer, encoder: Encoder):
        self.job, self.sources, self.encoder = job, sources, encoder
        vocab_size, dtype = tokenizer.vocab_size, token_dtype(tokenizer.vocab_size)
        self.folder = PartFolder(job.output_prefix, len(job.json_keys), dtype)
        eod = tokenizer.eod if job.append_eod else None
        self.shard_options: dict[str, Any] = {"vocab_size": vocab_size, "dtype": dtype, "eod": eod}

    def __call__(self, task: InputTask) -> Iterator[tuple[str, Optional[PartRecord]]]:
        """Make the parts of a task that do not exist yet.

        Yields:
            Name and record of each part. The last one of a stream has None: there is no such part.

        Raises:
            DataError: a record that is no document, unless they are skipped, with file and line number.
            EncoderMismatchError: gigatoken gives other ids than the tokenizer's library.
            OSError: the part cannot be written.
        """
        if isinstance(task, InputPart):
            yield task.name, _encode_part(self, task)
        else:
            yield from _encode_stripe(self, task)

    def load_finished(self, name: str) -> Optional[PartRecord]:
        """Return the record of a part that an earlier run made, if this job can use it."""
        record = self.folder.load_record(name)
        return None if record is None or (record.num_skipped and not self.job.skip_bad) else record

    def load_finished_task(self, task: InputTask) -> Optional[list[tuple[str, Optional[PartRecord]]]]:
        """Return what the task yields if earlier runs made all of it, else None."""
        names, end = [task.name] if isinstance(task, InputPart) else [], list[tuple[str, Optional[PartRecord]]]()
        if isinstance(task, Stripe):
            count = self.folder.num_parts(task.stream.name)
            if count is None:
                return None
            names = [task.stream.part_name(number) for number in range(task.number, count, task.count)]
            end = [(task.stream.part_name(count), None)] if count % task.count == task.number else []
        records = []
        for name in names:
            record = self.load_finished(name)
            if record is None:
                return None
            records.append((name, record))
        return [*records, *end]


def _encode_part(worker: Worker, part: InputPart) -> PartRecord:
    starts = {piece.source: piece.start for piece in part.pieces}

    def count_before(source_number: int) -> int:
        source, start = worker.sources[source_number], starts[source_number]
        if source.is_table:
            return rows_before(source, start)
        return records_before(source, start) if source.is_divisible else 0

    keys = worker.job.json_keys
    documents = {
        piece.source: read_documents(worker.sources[piece.source], keys, piece.start, piece.stop)
        for piece in part.pieces
    }
    return _write_part(worker, part.name, documents, count_before, sum(piece.input_bytes for piece in part.pieces))


def _encode_stripe(worker: Worker, stripe: Stripe) -> Iterator[tuple[str, Optional[PartRecord]]]:
    stream, source = stripe.stream, worker.sources[stripe.stream.source]

    def parse(records: Sequence[bytes], damage: Optional[DamagedFileError]) -> Iterator[Documents]:
        for first in range(0, len(records), PARSED_RECORDS):
            yield parse_records(source, records[first : first + PARSED_RECORDS], first, worker.job.json_keys)
        if damage is not None:
            raise damage

    def read() -> Iterator[tuple[int, Sequence[bytes], Optional[DamagedFileError]]]:
        """Yield the blocks: bytes on disk, records, damage. Damage has a part of its own."""
        try:
            for input_bytes, records in read_blocks(source, stream.block_bytes):
                yield input_bytes, records, None
        except DamagedFileError as error:
            yield 0, [], error

    def count_before(_: int) -> int:
        return num_before

    blocks, num_before = read(), 0
    for number, name in enumerate(stream.part_names()):
        is_own = number % stripe.count == stripe.number
        block = next(blocks, None)
        if block is None:
            worker.folder.save_num_parts(stream.name, number)
            if is_own:
                yield name, None
            return
        input_bytes, records, damage = block
        if is_own:
            record = worker.load_finished(name)
            if record is None:
                documents = {stream.source: parse(records, damage)}
                record = _write_part(worker, name, documents, count_before, input_bytes)
            yield name, record
        num_before += len(records)


def _write_part(
    worker: Worker,
    name: str,
    documents: dict[int, Iterator[Documents]],
    count_before: Callable[[int], int],
    input_bytes: int,
) -> PartRecord:
    """Write a part with the documents of some files, given by their numbers; `count_before` as for `_PartEncoder`."""
    with PartWriter(worker.folder, name) as writer:
        encoder = _PartEncoder(worker, writer, count_before)
        for source, blocks in documents.items():
            try:
                for block in blocks:
                    encoder.add(source, block)
            except DamagedFileError as error:
                encoder.reject(source, writer.num_records(source), f"the rest of the file is damaged: {error}")
        encoder.flush()
        return writer.finish(input_bytes)


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


def run_tasks(work: Callable[[Task], Iterable[Result]], tasks: Sequence[Task], workers: int) -> Iterator[Result]:
    """Yield everything that `work` yields for the tasks, as it comes: in order only with one worker.

    Args:
        work: called once per task. With several workers it runs in processes forked from this one, which take the tasks
            in order; results and exceptions are pickled.
        tasks: its arguments.
        workers: number of processes; 1 works in this process.

    Raises:
        DataError: a worker was killed.
        Exception: what `work` raises. The other workers are stopped.
    """
    if min(workers, len(tasks)) <= 1:
        for task in tasks:
            yield from work(task)
        return
    context = multiprocessing.get_context("fork")
    num_taken = context.Value("q", 0)
    pool: dict[Connection, Any] = {}
    try:
        for _ in range(min(workers, len(tasks))):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run_worker, args=(work, tasks, num_taken, sender), daemon=True)
            process.start()
            sender.close()  # only the worker has it now, so that the pipe ends with the worker
            pool[receiver] = process
        running = set(pool)
        while running:
            for ready in wait(running):
                assert isinstance(ready, Connection)
                try:
                    result = ready.recv()
                except (EOFError, OSError):
                    running.remove(ready)
                    _check_exit(pool[ready], workers)
                    continue
                if isinstance(result, Exception):
                    raise result
                yield result
    finally:
        for receiver, process in pool.items():
            process.terminate()
            process.join()
            receiver.close()


def _run_worker(
    work: Callable[[Task], Iterable[Any]], tasks: Sequence[Task], num_taken: Any, sender: Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent stops its workers
    set_worker_death_signal(signal.SIGKILL)
    # There is one process per core already; the library `tokenizers` would start threads on top.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        while True:
            with num_taken.get_lock():
                number = num_taken.value
                num_taken.value += 1
            if number >= len(tasks):
                return
            for result in work(tasks[number]):
                sender.send(result)
    except Exception as error:
        sender.send(error)


def _check_exit(process: Any, workers: int) -> None:
    """Wait for the end of a worker, and check that it ended well."""
    process.join()
    code = process.exitcode
    if code:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        raise DataError(
            f"A tokenizer process died: {how}. The machine may be out of memory; use fewer --workers than {workers}. "
            "Finished parts are kept: the same command resumes the job."
        )
