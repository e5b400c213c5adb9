"""Files that a reader of small files must refuse: not regular, too large, damaged, or made to exhaust it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

HUGE_BYTES = 1 << 40  # sparse: takes no room on the disk


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))  # the address of a socket is short


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, HUGE_BYTES)


KINDS: Mapping[str, Callable[[Path], object]] = MappingProxyType({
    "fifo": os.mkfifo,
    "socket": make_socket,
    "directory": os.mkdir,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
    "too large": make_sparse,
})  # fmt: skip
"""What makes each at a path; in whatever format, none can be read."""

JSON: Mapping[str, bytes] = MappingProxyType({
    "empty": b"",
    "zeros": b"\0" * 100,
    "null character": b'{"a": "\0"}',
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "long integer": b"[" + b"9" * 10_000 + b"]",
    "overflow": b"[1e999]",
    "NaN": b"[NaN]",
    "Infinity": b"[-Infinity]",
    "lone surrogate": b'{"a": "\\ud800"}',
    "integer of 400 digits": b"[" + b"9" * 400 + b"]",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "cut off": b'{"a": [1, 2',
})  # fmt: skip
"""Contents that are no JSON, or too much of it."""

YAML: Mapping[str, bytes] = MappingProxyType({
    "null character": b"a: \0",
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep blocks": b"- " * 100_000,
    "Python's tag": b'a: !!python/object/apply:os.system ["exit 1"]\n',
    "tag of another type": b"a: !!float x",
    "unknown tag": b"a: !thing 1\n",
    "tag of a time": b"a: !!timestamp x\n",
    "tag of a truth": b"a: !!bool x\n",
    "two documents": b"a: 1\n---\nb: 2\n",
    "no character": b'a: "\\UFFFFFFFF"\n',
    "not UTF-8": b"a: \xff\xfe\n",
    "cut off": b"a: [1, 2",
})  # fmt: skip
"""Contents that are no YAML, or too much of it."""

YAML_NUMBERS: Mapping[str, bytes] = MappingProxyType({
    "long integer": b"a: " + b"9" * 10_000,
})  # fmt: skip
"""YAML whose numbers are none; harmless where scalars stay text."""
