"""The stream that hashes what it writes, and its behaviour on a failing disk."""

from __future__ import annotations

import hashlib
import io
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megafp8.checkpoint.writer import MIN_SHARED_BYTES, HashingStream, to_cpu
from megafp8.utils.process import in_thread


class Slow(io.RawIOBase):
    """Takes a few bytes at a time, as a file does with large writes."""

    def __init__(self) -> None:
        super().__init__()
        self.content = b""

    def write(self, content) -> int:
        part = bytes(content[: max(1, MIN_SHARED_BYTES // 3)])
        self.content += part
        return len(part)


def test_hash_and_length_match_the_written_bytes(tmp_path: Path) -> None:
    pieces = [bytes([number]) * size for number, size in enumerate((0, 1, 1000, MIN_SHARED_BYTES, 1 << 20, 7))]
    for opened in (Slow, partial(open, tmp_path / "file", "wb", buffering=0)):
        with opened() as file, HashingStream(file) as stream:
            for piece in pieces:
                assert stream.write(memoryview(piece)) == len(piece)
            stream.flush()
        assert (stream.tell(), stream.sha256()) == (sum(map(len, pieces)), hashlib.sha256(b"".join(pieces)).hexdigest())
        content = file.content if isinstance(file, Slow) else (tmp_path / "file").read_bytes()
        assert content == b"".join(pieces)


def test_the_hash_may_lag_behind_and_keeps_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces are copied, because their memory is reused. Large ones are kept with their owner."""
    monkeypatch.setattr("megafp8.checkpoint.writer.MAX_LAG_BYTES", 3 * MIN_SHARED_BYTES)
    may_hash = threading.Event()
    plain_sha256 = hashlib.sha256
    digest = plain_sha256()
    slow = SimpleNamespace(update=lambda piece: may_hash.wait(10) and digest.update(piece), hexdigest=digest.hexdigest)
    monkeypatch.setattr("megafp8.checkpoint.writer.hashlib", SimpleNamespace(sha256=lambda: slow))
    file, expected = io.BytesIO(), plain_sha256(b"abc" + bytes(4 * MIN_SHARED_BYTES)).hexdigest()
    stream, small = HashingStream(file), bytearray(b"abc")
    with stream:
        stream.write(small)
        small[:] = b"xyz"
        stream.owner = owner = Owner()
        seen = weakref.ref(owner)
        for _ in range(2):
            stream.write(bytes(MIN_SHARED_BYTES))
        stream.owner = owner = None
        assert seen() is not None and file.tell() == 3 + 2 * MIN_SHARED_BYTES, "written, and not hashed yet"
        late = in_thread(stream.write, bytes(2 * MIN_SHARED_BYTES))
        time.sleep(0.1)
        assert not late.done(), "no more than so much is kept"
        may_hash.set()
        assert late.result(10) == 2 * MIN_SHARED_BYTES
    assert stream.sha256() == expected
    assert seen() is None


class Owner:
    """An object whose deletion can be observed."""


def test_a_disk_failure_is_reported() -> None:
    with open("/dev/full", "wb", buffering=0) as file:
        stream = HashingStream(file)
        with pytest.raises(OSError, match="No space left"):
            stream.write(bytes(MIN_SHARED_BYTES))


def test_a_view_is_written_without_its_base() -> None:
    whole = torch.arange(100)
    part = to_cpu(whole[10:20])
    assert part.equal(whole[10:20])
    assert part.untyped_storage().nbytes() == 80
    assert to_cpu(whole).data_ptr() == whole.data_ptr(), "a complete array is not copied"
    buffer = io.BytesIO(b"object")
    assert to_cpu(buffer) is buffer
