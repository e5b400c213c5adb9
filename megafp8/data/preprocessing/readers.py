"""The input of preprocessing: which files there are, how they are divided, and the raw records of each piece.

A record is a line of JSON or one plain text, as bytes, not decoded yet. Three ways to divide, all of them a matter of
the input alone, so that neither the number of workers nor their speed decides what is read together:

- a plain file by byte ranges: to a range belong the records that start in it;
- a table (see `table_readers`) by row groups;
- a compressed file by the blocks of its content. It can be read from its start only, so every worker that takes part
  in a large one decompresses all of it and keeps each n-th block; nothing has to be passed between processes.

Memory: a block (4 MiB) at a time, and the longest record. A record has a limit, as a compressed file of 1 MB may hold
one of 1 GB.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any, BinaryIO, Optional

from megafp8.data.preprocessing.tool_outputs import is_tool_output
from megafp8.errors import CapabilityError, DataError
from megafp8.utils.files import path_fault

BLOCK_BYTES = 4 << 20
JSONL, TEXT, PARQUET, DATASET = "jsonl", "text", "parquet", "dataset"
SUFFIXES = {".jsonl": JSONL, ".json": JSONL, ".ndjson": JSONL, ".txt": TEXT, ".parquet": PARQUET}
COMPRESSIONS = (".gz", ".zst")
# A document is held in memory as a whole, several times.
MAX_DOCUMENT_BYTES = 256 << 20
UTF8_BOM = b"\xef\xbb\xbf"


class DamagedFileError(DataError):
    """A compressed file that cannot be read to its end. What was read before is sound."""


@dataclass(frozen=True)
class InputSource:
    """One file of the input, or one dataset.

    Attributes:
        path: of the file, or the dataset's name.
        kind: JSONL, TEXT, PARQUET or DATASET.
        num_bytes: size of the file, as it is on the disk.
        mtime_ns: when it was last written; a dataset's is 0.
        compression: ".gz", ".zst" or "".
        delimiter: what ends a record; None when the file is one record, or a table.
        fingerprint: what tells a dataset from another of the same name.
        max_document_bytes: largest record of a file that is no table, decompressed.
    """

    path: str
    kind: str
    num_bytes: int
    mtime_ns: int
    compression: str = ""
    delimiter: Optional[bytes] = None
    fingerprint: str = ""
    max_document_bytes: int = MAX_DOCUMENT_BYTES

    @property
    def is_table(self) -> bool:
        """Whether it is read by `table_readers`."""
        return self.kind in (PARQUET, DATASET)

    @property
    def is_divisible(self) -> bool:
        """Whether byte ranges of the file can be read by themselves."""
        return not self.compression and self.delimiter is not None and not overlaps_itself(self.delimiter)

    @property
    def record_name(self) -> str:
        """What its records are called in messages, where they are counted from 1."""
        if self.is_table:
            return "row"
        return "line" if self.delimiter == b"\n" else "document"

    def describe(self) -> dict[str, Any]:
        """Return what identifies it in a manifest. Its content is not hashed: that would be one more pass over it."""
        found: dict[str, Any] = {"path": self.path, "bytes": self.num_bytes, "mtime_ns": self.mtime_ns}
        if self.kind == TEXT and self.delimiter is not None:
            found["separator"] = self.delimiter.decode("utf-8")
        if self.fingerprint:
            found["fingerprint"] = self.fingerprint
        return found


def find_sources(
    inputs: Sequence[str],
    text_separator: Optional[str] = None,
    on_notice: Callable[[str], None] = lambda _: None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
) -> list[InputSource]:
    """Return the files that names, folders and patterns stand for: a folder's and a pattern's sorted, the rest in the
    order given.

    Args:
        inputs: files, folders (read with all below, files of other kinds left out) and glob patterns. Folders and
            patterns leave out what tokenizers and preprocessing wrote.
        text_separator: what stands between the documents of a text file; None: each file is one document.
        on_notice: called with what is left out so.
        max_document_bytes: largest line or text that is read.

    Raises:
        DataError: a name without a file, a file that two names stand for, a kind of file that is not known, an empty
            separator, or a text file that is one document of more than `max_document_bytes`; all of them at once.
    """
    if text_separator == "":
        raise DataError("--text-separator is empty. Leave it out when each text file is one document.")
    sources: list[InputSource] = []
    found: set[str] = set()
    problems: list[str] = []
    for name in inputs:
        matches, left_out = _matches(name)
        if left_out:
            on_notice(
                f"--input {name}: left out {len(left_out)} files that tokenizers or preprocessing wrote, such as "
                f"{left_out[0]}; name a file itself to read it"
            )
        if not matches:
            kinds = f" of a known kind: {_known_suffixes()}" if Path(name).is_dir() else ""
            problems.append(f"--input {name}: there is no such file{kinds}.")
        repeated = [path for path in matches if os.path.realpath(path) in found]
        found.update(map(os.path.realpath, matches))
        if repeated:
            more = f" and {len(repeated) - 1} more" if len(repeated) > 1 else ""
            problems.append(
                f"--input {name}: {repeated[0]}{more} was named before, and its text would be taken twice. For text "
                "that is to be seen more often, give a shard of its own a larger weight in --data-path."
            )
        for path in matches:
            try:
                source = _source_of(path, text_separator, max_document_bytes)
            except (DataError, OSError) as error:
                problems.append(f"--input {path}: {error.strerror if isinstance(error, OSError) else error}")
            else:
                sources.append(source)
    if problems:
        raise DataError("\n".join(problems))
    return sources


def read_range(source: InputSource, start: int, stop: int) -> Iterator[list[bytes]]:
    """Yield the records of a file, block by block.

    Args:
        source: no table.
        start, stop: of a divisible file, the bytes in which the records start; of others, 0 and the file's size.

    Raises:
        DamagedFileError: after the records before the damage.
        DataError: a record is longer than the source allows.
    """
    with open_content(source) as stream:
        content = _Content(stream, source.path)
        if source.delimiter is None:
            yield [_whole_content(source, content)]
        elif not source.is_divisible:
            content.skip_mark()
            yield from _split(content, source, block_bytes=BLOCK_BYTES)
        else:
            assert not source.compression
            start = _find_start(stream, start, source.delimiter)
            stream.seek(start)
            if start == 0:
                content.skip_mark()
            yield from _split(content, source, block_bytes=BLOCK_BYTES, num_bytes=stop - stream.tell())


def read_blocks(source: InputSource, block_bytes: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the records of a file that can be read from its start only, those together that end in one block.

    Args:
        source: no table, with a delimiter.
        block_bytes: of the content, decompressed.

    Yields:
        The bytes of the file, as it is on the disk, that were read for a block, and its records.

    Raises:
        DamagedFileError: after the records before the damage.
        DataError: a record is longer than the source allows.
    """
    assert source.delimiter is not None
    with open(source.path, "rb") as raw, open_content(source, raw) as stream:
        content, position = _Content(stream, source.path), 0
        content.skip_mark()
        for records in _split(content, source, block_bytes=block_bytes):
            yield raw.tell() - position, records
            position = raw.tell()


def records_before(source: InputSource, start: int) -> int:
    """Return how many records of a divisible file come before those of the range that starts at `start`."""
    assert source.delimiter is not None
    found, rest = 0, b""
    with open(source.path, "rb") as stream:
        left = _find_start(stream, start, source.delimiter)
        stream.seek(0)
        while left > 0 and (block := stream.read(min(BLOCK_BYTES, left))):
            found += (rest + block).count(source.delimiter)
            rest = block[len(block) - len(source.delimiter) + 1 :]
            left -= len(block)
    return found


def open_content(source: InputSource, raw: Optional[BinaryIO] = None) -> BinaryIO:
    """Open a file for reading, decompressed where it is compressed.

    Args:
        source: the file.
        raw: the file, opened; default, it is opened here.

    Raises:
        CapabilityError: Zstandard without its library.
    """
    file: Any = source.path if raw is None else raw
    if source.compression == ".gz":
        return gzip.open(file)
    if source.compression == ".zst":
        return _zstd(source.path).open(file)
    return open(source.path, "rb") if raw is None else raw


def overlaps_itself(delimiter: bytes) -> bool:
    """Whether a delimiter can begin inside of another, so that reading from the middle may find other ones."""
    return any(delimiter.startswith(delimiter[shift:]) for shift in range(1, len(delimiter)))


def _matches(name: str) -> tuple[list[Path], list[Path]]:
    """The files that a name stands for, and those that it stands for as well and that are no text."""
    if Path(name).is_dir():
        found = sorted(path for path in Path(name).rglob("*") if path.is_file() and _kind_of(path.name) is not None)
    elif has_magic(name) and not Path(name).exists():
        found = [Path(path) for path in sorted(glob(name, recursive=True)) if Path(path).is_file()]
    else:
        return [Path(name)] if Path(name).is_file() else [], []
    left_out = [path for path in found if is_tool_output(path)]
    return [path for path in found if path not in set(left_out)], left_out


def _kind_of(name: str) -> Optional[tuple[str, str]]:
    """Kind and compression that a file's name tells; None when it tells none."""
    compression = next((suffix for suffix in COMPRESSIONS if name.endswith(suffix)), "")
    kind = SUFFIXES.get(Path(name[: len(name) - len(compression)]).suffix)
    return None if kind is None or (kind == PARQUET and compression) else (kind, compression)


def _known_suffixes() -> str:
    return f"{', '.join(SUFFIXES)} (but for Parquet each also with {' or '.join(COMPRESSIONS)})"


def _source_of(path: Path, text_separator: Optional[str], max_document_bytes: int) -> InputSource:
    if fault := path_fault(str(path)):
        raise DataError(f"{fault}. Rename the file.")
    found = _kind_of(path.name)
    if found is None:
        raise DataError(f"its kind is told by its name, and known are {_known_suffixes()}.")
    kind, compression = found
    delimiter = b"\n" if kind == JSONL else None
    if kind == TEXT and text_separator is not None:
        delimiter = text_separator.encode("utf-8")
    status = path.stat()
    if kind == TEXT and delimiter is None and status.st_size > max_document_bytes:
        raise DataError(
            f"it has {status.st_size} bytes, and without --text-separator a text file is one document (of at most "
            f"{max_document_bytes} bytes). Say what separates its documents, --text-separator '\\n', or raise "
            "--max-document-bytes."
        )
    if compression == ".zst":
        _zstd(str(path))
    return InputSource(
        str(path), kind, status.st_size, status.st_mtime_ns, compression, delimiter,
        max_document_bytes=max_document_bytes,
    )  # fmt: skip


def _zstd(path: str) -> Any:
    try:
        from backports import zstd
    except ImportError as error:
        raise CapabilityError(
            f"{path} is compressed with Zstandard, which needs the package backports.zstd ({error}). "
            "Install it: pip install 'megafp8[data]'"
        ) from error
    return zstd


class _Content:
    """Reads the content of a file and says once, in the end, that the file is damaged."""

    def __init__(self, stream: Any, path: str):
        self._stream, self._path = stream, path
        self._damage: Optional[Exception] = None

    def read(self, num_bytes: int) -> bytes:
        """Return the next bytes: all that were asked for, unless the file ends or is damaged; none at its end.

        Raises:
            DamagedFileError: nothing could be read.
        """
        chunks = []
        while num_bytes > 0 and self._damage is None:
            try:
                chunk = self._stream.read1(min(num_bytes, BLOCK_BYTES))
            except Exception as error:
                if not _is_damage(error):
                    raise
                self._damage = error
                break
            if not chunk:
                break
            chunks.append(chunk)
            num_bytes -= len(chunk)
        if self._damage is not None and not chunks:
            raise DamagedFileError(str(self._damage)) from self._damage
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def skip_mark(self) -> None:
        """Skip the byte order mark that some programs put before UTF-8."""
        try:
            marked = self._stream.peek(len(UTF8_BOM)).startswith(UTF8_BOM)
        except Exception as error:
            if not _is_damage(error):
                raise
            self._damage, marked = error, False
        if marked:
            self.read(len(UTF8_BOM))


def _is_damage(error: Exception) -> bool:
    """Whether a decompressor raised it over its input. Zstandard's error is known only where its library is there."""
    return isinstance(error, (EOFError, gzip.BadGzipFile, zlib.error)) or type(error).__name__ == "ZstdError"


def _whole_content(source: InputSource, content: _Content) -> bytes:
    content.skip_mark()
    text = content.read(source.max_document_bytes + 1)
    if len(text) > source.max_document_bytes:
        raise DataError(
            f"{source.path} is one document of more than {source.max_document_bytes} bytes. Say what separates its "
            "documents, --text-separator '\\n', or raise --max-document-bytes."
        )
    content.read(1)  # the checksum at the end of a compressed file
    return text


def _find_start(stream: BinaryIO, start: int, delimiter: bytes) -> int:
    """Return where the first record starts that starts at `start` or later; the file's size when none does."""
    if start == 0:
        return 0
    position = max(start - len(delimiter), 0)
    stream.seek(position)
    content = b""
    while block := stream.read(64 << 10):
        content += block
        place = content.find(delimiter)
        if place >= 0:
            return position + place + len(delimiter)
        seen = max(len(content) - len(delimiter) + 1, 0)
        position, content = position + seen, content[seen:]
    return position + len(content)


def _split(
    content: _Content, source: InputSource, *, block_bytes: int, num_bytes: Optional[int] = None
) -> Iterator[list[bytes]]:
    """Yield the records of a content, block by block: all of them, or those that start in the next `num_bytes`.

    Raises:
        DataError: a record is longer than the source allows. No more than that is read of it; the limit decides nothing
            else, such as which records are in a block.
    """
    delimiter, limit = source.delimiter, source.max_document_bytes
    assert delimiter is not None
    too_many = limit + len(delimiter)  # bytes without a delimiter; of fewer, the last ones may be a part of it
    rest, left = b"", num_bytes
    while left is None or left > 0:
        # A record longer than a block: blocks that grow with it keep the time linear.
        size, room = max(block_bytes, len(rest)), too_many - len(rest)
        size = size if left is None else min(size, left)
        block = content.read(min(size, room))
        if not block:
            break
        if len(block) == room:
            if delimiter not in rest + block:
                raise _too_long(source)
            with suppress(DamagedFileError):  # the next read raises it again
                block += content.read(size - room)
        if left is not None:
            left -= len(block)
        records = (rest + block).split(delimiter)
        rest = records.pop()
        if max(map(len, records), default=0) > limit or len(rest) >= too_many:
            raise _too_long(source)
        yield records
    parts = [rest]
    if rest and left is not None:
        while len(parts := rest.split(delimiter, 1)) == 1 and len(rest) < too_many:
            if not (block := content.read(max(64 << 10, len(rest)))):
                break
            rest += block
    if len(parts[0]) > limit:
        raise _too_long(source)
    if rest:
        yield parts[:1]


def _too_long(source: InputSource) -> DataError:
    return DataError(
        f"{source.path} has a {source.record_name} of more than {source.max_document_bytes} bytes. If that is right, "
        "raise --max-document-bytes; it is held in memory several times."
    )
