"""The stream that hashes what it writes, and what a failing disk leads to."""

from __future__ import annotations

import hashlib
import io
from functools import partial
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint.hashing_writer import MIN_OVERLAPPED_BYTES, HashingStream, on_cpu


class Slow(io.RawIOBase):
    """Takes a few bytes at a time, as a file does of very many."""

    def __init__(self) -> None:
        super().__init__()
        self.content = b""

    def write(self, content) -> int:
        part = bytes(content[: max(1, MIN_OVERLAPPED_BYTES // 3)])
        self.content += part
        return len(part)


def test_hash_and_length_are_those_of_what_was_written(tmp_path: Path) -> None:
    pieces = [bytes([number]) * size for number, size in enumerate((0, 1, 1000, MIN_OVERLAPPED_BYTES, 1 << 20, 7))]
    for opened in (Slow, partial(open, tmp_path / "file", "wb", buffering=0)):
        with opened() as file:
            stream = HashingStream(file)
            for piece in pieces:
                assert stream.write(memoryview(piece)) == len(piece)
            stream.flush()
        assert (stream.tell(), stream.sha256) == (sum(map(len, pieces)), hashlib.sha256(b"".join(pieces)).hexdigest())
        content = file.content if isinstance(file, Slow) else (tmp_path / "file").read_bytes()
        assert content == b"".join(pieces)


def test_a_disk_that_fails_is_told_of() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        stream = HashingStream(file)
        with pytest.raises(OSError, match="No space left"):
            stream.write(bytes(MIN_OVERLAPPED_BYTES))


def test_a_view_is_written_without_what_it_is_a_view_of() -> None:
    whole = torch.arange(100)
    part = on_cpu(whole[10:20])
    assert part.equal(whole[10:20])
    assert part.untyped_storage().nbytes() == 80
    assert on_cpu(whole).data_ptr() == whole.data_ptr(), "a whole one is not copied"
    buffer = io.BytesIO(b"object")
    assert on_cpu(buffer) is buffer
