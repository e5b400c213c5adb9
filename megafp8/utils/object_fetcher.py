"""Reads ranges of objects into files for a process that cannot use obstore itself.

obstore's threads do not exist in a forked child of a process that uses it, such as a data loader of torch's. Such a
process starts this module once, for all its objects. A request is a line of JSON on standard input, the answer a line
on standard output: null, or the fields of an `ObjectError`. It ends with its input.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from megafp8.utils.files import atomic_write
from megafp8.utils.object_store import ObjectError, ObjectFolder, is_usable
from megafp8.utils.process import package_environment
from megafp8.utils.strict_json import parse_json


def fetch_range(folder: ObjectFolder, name: str, first: int, num_bytes: int, etag: str, path: Path) -> None:
    """Read bytes of an object into a file, which is complete or absent also for other processes.

    One thread of a forked process may call it.

    Args:
        etag: that the object must have.

    Raises:
        ObjectError: the request failed, or the object has another tag.
        OSError: the file cannot be written.
    """
    if is_usable():
        _copy_range(folder, name, first, num_bytes, etag, path)
        return
    child = _child(os.getpid())
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(json.dumps([folder.address, name, first, num_bytes, etag, str(path)]) + "\n")
        child.stdin.flush()
        answer = child.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        _child.cache_clear()
        raise ObjectError(5, "the process that reads it has died", folder.name_of(name))
    if (error := parse_json(answer)) is not None:
        raise ObjectError(*error)


@functools.cache
def _child(pid: int) -> subprocess.Popen[str]:
    """The process that reads for the process `pid`, which is this one: a fork must not use that of its parent."""
    return subprocess.Popen(
        [sys.executable, "-m", "megafp8.utils.object_fetcher"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=package_environment(),
    )  # fmt: skip


def _copy_range(folder: ObjectFolder, name: str, first: int, num_bytes: int, etag: str, path: Path) -> None:
    content = folder.read_range(name, first, num_bytes, etag)
    with atomic_write(path) as stream:
        stream.write(content)


def main() -> None:
    """Answer requests until the input ends."""
    opened = functools.cache(ObjectFolder)
    for line in sys.stdin:
        address, name, first, num_bytes, etag, path = parse_json(line)
        try:
            _copy_range(opened(address), name, first, num_bytes, etag, Path(path))
            answer = None
        except ObjectError as error:
            answer = [error.number, error.strerror, error.filename]
        except OSError as error:
            answer = [error.errno, f"cannot be written to the cache: {error.strerror}", str(path)]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
