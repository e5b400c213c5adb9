"""Paths as people give them: what no file system can have is refused before anything is opened or made."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4095 - 1 - MAX_NAME_BYTES  # of a folder that a file fits into
SHOWN = 60


def path_fault(path: str) -> Optional[str]:
    """Why no file can have this path; None if one can.

    Linux takes any bytes. Python reads those that are not UTF-8 as lone surrogates, which can be written neither to
    JSON nor to most terminals, so they are refused, too.
    """
    try:
        encoded = path.encode("utf-8")
    except UnicodeEncodeError:
        return "is no path of a file: it is not UTF-8"
    if b"\0" in encoded:
        return "is no path of a file: it holds a null character"
    longest = max(map(len, encoded.split(b"/")))
    if longest > MAX_NAME_BYTES:
        return f"is no path of a file: it has a name of {longest:,} bytes, more than {MAX_NAME_BYTES}"
    if len(encoded) > MAX_PATH_BYTES:
        return f"is no path of a file: it has {len(encoded):,} bytes, more than {MAX_PATH_BYTES:,}"
    return None


def shown(text: str) -> str:
    """The beginning of a text for a message, with escapes for what cannot be printed."""
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def path_text(text: str) -> str:
    """The `type` of an argparse argument that is a path or the prefix of some.

    Raises:
        argparse.ArgumentTypeError: no file can have this path.
    """
    if fault := path_fault(text):
        raise argparse.ArgumentTypeError(f"{shown(text)} {fault}")
    return text


def path_argument(text: str) -> Path:
    """As `path_text`, for arguments that are a `Path`."""
    return Path(path_text(text))
