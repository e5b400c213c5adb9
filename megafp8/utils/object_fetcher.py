"""Reads ranges of objects into files for a process that cannot use obstore itself.

obstore's threads do not exist in a forked child of a process that uses it, such as a data loader of torch's. Such a
process starts this module once. A request is a line of JSON on standard input, the answer a line on standard output:
null, or the fields of an `ObjectError`. It ends with its input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Optional

from megafp8.utils.files import atomic_write
from megafp8.utils.object_store import ObjectError, ObjectFolder, is_usable
from megafp8.utils.strict_json import parse_json


class RangeFetcher:
    """Reads ranges of objects into files, in this process or through a child."""

    def __init__(self) -> None:
        self._child: Optional[subprocess.Popen[str]] = None
        self._pid = 0

    def fetch(self, folder: str, name: str, first: int, num_bytes: int, etag: str, path: Path) -> None:
        """Read bytes of an object into a file, which is complete or absent also for other processes.

        Args:
            folder: URL of the object's folder.

        Raises:
            ObjectError: the request failed, or the object has another tag.
            OSError: the file cannot be written.
        """
        if is_usable():
            fetch_here(folder, name, first, num_bytes, etag, path)
            return
        if self._child is None or self._pid != os.getpid():
            package = str(Path(__file__).resolve().parents[2])
            paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
            self._child = subprocess.Popen(
                [sys.executable, "-m", "megafp8.utils.object_fetcher"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip
            self._pid = os.getpid()
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps([folder, name, first, num_bytes, etag, str(path)]) + "\n")
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._child = None
            raise ObjectError(5, "the process that reads it has died", f"{folder}/{name}")
        if (error := parse_json(answer)) is not None:
            raise ObjectError(*error)


def fetch_here(folder: str, name: str, first: int, num_bytes: int, etag: str, path: Path) -> None:
    """As `RangeFetcher.fetch`, in this process."""
    content = ObjectFolder(folder).read_range(name, first, num_bytes, etag)
    with atomic_write(path) as stream:
        stream.write(content)


def main() -> None:
    """Answer requests until the input ends."""
    for line in sys.stdin:
        folder, name, first, num_bytes, etag, path = parse_json(line)
        try:
            fetch_here(folder, name, first, num_bytes, etag, Path(path))
            answer = None
        except ObjectError as error:
            answer = [error.number, error.strerror, error.filename]
        except OSError as error:
            answer = [error.errno, f"cannot be written to the cache: {error.strerror}", str(path)]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
