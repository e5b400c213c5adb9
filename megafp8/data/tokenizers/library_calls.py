"""Files for a tokenizer's library, and what the library raises."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megafp8.errors import DataError, Megafp8Error
from megafp8.utils.files import LIST_BYTES, UnreadableFile, read_bytes


class NoEndOfDocument(DataError):
    """A tokenizer that is whole, but has no token that ends a document."""


def read_tokenizer_file(path: Path, flag: str) -> bytes:
    """The content of a tokenizer's file, which a library would read without a limit.

    Raises:
        DataError: it is missing, not a regular file, larger than `LIST_BYTES` (256 MiB), or cannot be read.
    """
    try:
        return read_bytes(path, LIST_BYTES)
    except UnreadableFile as error:
        problem = "no such file" if error.is_missing else f"cannot be read, {error.reason}"
        raise DataError(f"{flag} {path}: {problem}.") from error


def is_library_failure(error: BaseException) -> bool:
    """Whether an error other than a lack of memory is an exception, or a panic of Rust code, which is no Exception."""
    is_failure = isinstance(error, Exception) or type(error).__name__ == "PanicException"
    return is_failure and not isinstance(error, MemoryError)


@contextmanager
def library_failures(problem: str) -> Iterator[None]:
    """Turn whatever a library raises in the block, but for MemoryError, into an error that starts with `problem`.

    Raises:
        DataError: the library failed.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Megafp8Error) or not is_library_failure(error):
            raise
        raise DataError(f"{problem}: {error}") from error


def library_call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a tokenizer's method that calls its library, so that a failure is a `DataError` with `self.origin`."""

    @functools.wraps(method)
    def call(self: Any, argument: Any) -> Any:
        with library_failures(f"the tokenizer of {self.origin} fails on this text"):
            return method(self, argument)

    return call
