"""What the kinds of tokenizers share: their libraries, their files, and what identifies them."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megafp8.errors import CapabilityError, DataError
from megafp8.utils import strict_json
from megafp8.utils.files import UnreadableFile, file_sha256


def identifiers_of(tokenizer: Any, hashes: Sequence[str], **options: Any) -> "OrderedDict[str, Any]":
    """Return everything that decides the ids of `tokenizer`.

    Args:
        tokenizer: with `vocab_size` and `eod`.
        hashes: SHA-256 of what it was made from: files count by content, not by path.
        options: of this kind of tokenizer.
    """
    identifiers: OrderedDict[str, Any] = OrderedDict()
    identifiers["class"] = type(tokenizer).__name__
    identifiers["sha256"] = list(hashes)
    identifiers["vocab_size"] = tokenizer.vocab_size
    identifiers["eod"] = tokenizer.eod
    identifiers.update(options)
    return identifiers


def hashes_of(*paths: Path) -> list[str]:
    """Return the SHA-256 of each file."""
    return [file_sha256(path) for path in paths]


def load_library(name: str, kind: str) -> ModuleType:
    """Import the library of a kind of tokenizer.

    Raises:
        CapabilityError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CapabilityError(
            f"--tokenizer-type {kind} needs the package {name}, which cannot be imported here ({error}). "
            f"Install it: pip install {name}"
        ) from error


def existing_file(path: str, flag: str) -> Path:
    """Return the path of a file that is there.

    Raises:
        DataError: it is not.
    """
    if not Path(path).is_file():
        raise DataError(f"{flag} {path}: there is no such file.")
    return Path(path)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        DataError: it is none.
    """
    try:
        return strict_json.read_json(path)
    except UnreadableFile as error:
        raise DataError(f"{path} cannot be read: {error.reason}") from error
