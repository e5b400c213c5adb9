"""Readers of JSON lines and text files, compressed or not.

A record is a line of JSON or one plain text, as bytes that are not decoded yet. How a file is divided depends on the
input alone, never on the number of workers or their speed:

- A plain file is divided into byte ranges. The records that start in a range belong to it.
- A compressed file is divided into blocks of its content. It can only be read from its start. Each worker that reads
  a large one decompresses all of it and keeps every n-th block, so that no data is passed between processes.

Tables are divided by `table_readers`. Memory: one block (4 MiB) and the longest record. The size of a record is
limited, because a compressed file of 1 MB may hold one of 1 GB.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO, Optional

from megafp8.data.preprocessing.sources import InputSource, import_zstd
from megafp8.errors import DataError

BLOCK_BYTES = 4 << 20
UTF8_BOM = b"\xef\xbb\xbf"


class DamagedFileError(DataError):
    """A compressed file that cannot be read to its end. What was read before the damage is valid."""


def read_range(source: InputSource, start: int, stop: int) -> Iterator[list[bytes]]:
    """Yield the records of a file, block by block.

    Args:
        source: not a table.
        start, stop: byte range in which the records start; for a file that is not divisible 0 and its size.

    Raises:
        DamagedFileError: after the records before the damage.
        DataError: a record is longer than the source allows.
    """
    with _open_content(source) as stream:
        content = _Content(stream)
        if source.delimiter is None:
            yield [_read_document(source, content)]
        elif not source.is_divisible:
            content.skip_bom()
            yield from _split(content, source, block_bytes=BLOCK_BYTES)
        else:
            start = _find_start(stream, start, source.delimiter)
            stream.seek(start)
            if start == 0:
                content.skip_bom()
            yield from _split(content, source, block_bytes=BLOCK_BYTES, num_bytes=stop - stream.tell())


def read_blocks(source: InputSource, block_bytes: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the records of a file that can only be read from its start, grouped by the block in which they end.

    Args:
        source: not a table, with a delimiter.
        block_bytes: size of a block of the decompressed content.

    Yields:
        The bytes of the file on disk that were read for a block, and its records.

    Raises:
        DamagedFileError: after the records before the damage.
        DataError: a record is longer than the source allows.
    """
    with open(source.path, "rb") as raw, _open_content(source, raw) as stream:
        content, position = _Content(stream), 0
        content.skip_bom()
        for records in _split(content, source, block_bytes=block_bytes):
            yield raw.tell() - position, records
            position = raw.tell()


def records_before(source: InputSource, start: int) -> int:
    """Return how many records of a divisible file come before those of the range that starts at `start`."""
    assert source.delimiter is not None
    num_records, rest = 0, b""
    with open(source.path, "rb") as stream:
        left = _find_start(stream, start, source.delimiter)
        stream.seek(0)
        while left > 0 and (block := stream.read(min(BLOCK_BYTES, left))):
            num_records += (rest + block).count(source.delimiter)
            rest = block[len(block) - len(source.delimiter) + 1 :]
            left -= len(block)
    return num_records


def _open_content(source: InputSource, raw: Optional[BinaryIO] = None) -> Any:
    """Open a file, or its open stream `raw`, for reading the decompressed content.

    Raises:
        CapabilityError: the Zstandard library is not installed.
    """
    if source.compression == ".gz":
        return gzip.open(raw or source.path)
    if source.compression == ".zst":
        return import_zstd(source.path).open(raw or source.path)
    return raw or open(source.path, "rb")


class _Content:
    """Reads the content of a file. Damage is reported once, after all that can be read before it."""

    def __init__(self, stream: Any):
        self._stream = stream
        self._damage: Optional[Exception] = None

    def read(self, num_bytes: int) -> bytes:
        """Return the next bytes: fewer than `num_bytes` only where the file ends or is damaged, none at its end.

        Raises:
            DamagedFileError: nothing could be read.
        """
        chunks = []
        while num_bytes > 0 and self._damage is None:
            try:
                chunk = self._stream.read1(min(num_bytes, BLOCK_BYTES))
            except Exception as error:
                self._save_damage(error)
                break
            if not chunk:
                break
            chunks.append(chunk)
            num_bytes -= len(chunk)
        if self._damage is not None and not chunks:
            raise DamagedFileError(str(self._damage)) from self._damage
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def skip_bom(self) -> None:
        """Skip the byte order mark that some programs put before UTF-8."""
        try:
            has_bom = self._stream.peek(len(UTF8_BOM)).startswith(UTF8_BOM)
        except Exception as error:
            self._save_damage(error)
        else:
            if has_bom:
                self.read(len(UTF8_BOM))

    def _save_damage(self, error: Exception) -> None:
        """Keep the error of a decompressor about its input; raise any other."""
        # Zstandard's error type exists only where its library is installed.
        if not isinstance(error, (EOFError, gzip.BadGzipFile, zlib.error)) and type(error).__name__ != "ZstdError":
            raise error
        self._damage = error


def _read_document(source: InputSource, content: _Content) -> bytes:
    """Read a file that is one document."""
    content.skip_bom()
    text = content.read(source.max_document_bytes + 1)
    if len(text) > source.max_document_bytes:
        raise DataError(
            f"{source.path} is one document of more than {source.max_document_bytes} bytes. Set the separator of "
            "documents, for example --text-separator '\\n', or raise --max-document-bytes."
        )
    content.read(1)  # makes the decompressor verify the checksum at the end
    return text


def _find_start(stream: BinaryIO, start: int, delimiter: bytes) -> int:
    """Return the offset of the first record that starts at `start` or later; the file's size if there is none."""
    if start == 0:
        return 0
    position = max(start - len(delimiter), 0)
    stream.seek(position)
    content = b""
    while block := stream.read(64 << 10):
        content += block
        offset = content.find(delimiter)
        if offset >= 0:
            return position + offset + len(delimiter)
        searched = max(len(content) - len(delimiter) + 1, 0)
        position, content = position + searched, content[searched:]
    return position + len(content)


def _split(
    content: _Content, source: InputSource, *, block_bytes: int, num_bytes: Optional[int] = None
) -> Iterator[list[bytes]]:
    """Yield the records of a content, block by block: all, or those that start in the next `num_bytes`.

    Raises:
        DataError: a record is longer than the source allows. At most that many bytes of it are read. The limit has no
            other effect, for example on which records form a block.
    """
    delimiter, limit = source.delimiter, source.max_document_bytes
    assert delimiter is not None
    # So many bytes without a delimiter are too many. The last ones of fewer bytes may be the start of a delimiter.
    too_many = limit + len(delimiter)
    rest, left = b"", num_bytes
    while left is None or left > 0:
        # Blocks grow with a record that is longer than a block, which keeps the time linear.
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
        f"{source.path} has a {source.record_name} of more than {source.max_document_bytes} bytes. If this is correct, "
        "raise --max-document-bytes; memory holds several copies of a document."
    )
