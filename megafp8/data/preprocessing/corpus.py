"""A text corpus that every machine has: the source code of Python's standard library.

It is code and English prose (comments, docstrings), about 10 MB, and needs neither a network nor a licence. Each module
is one document. The documents are in a fixed shuffled order: Megatron's `--split` takes the validation documents from
the end, so that validation has the same kind of text as training, from other modules.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megafp8.errors import DataError
from megafp8.utils.files import atomic_write

DEFAULT_MAX_BYTES = 10_000_000

# Installed packages, tests (odd encodings, generated data), tables of code points, and Python 2 code (lib2to3).
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "lib2to3"}
)


@dataclass(frozen=True)
class Document:
    """One module: its text, and its path relative to the standard library's folder, with forward slashes."""

    text: str
    source: str


@dataclass(frozen=True)
class CorpusSummary:
    """Contents of a corpus file. `changed` is False if the file existed with the same bytes."""

    path: Path
    num_documents: int
    text_bytes: int
    changed: bool


def stdlib_folder() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def find_modules(folder: Path) -> list[Path]:
    """Return the `.py` files of the corpus, as sorted paths relative to `folder`."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]  # most files are in these
        found += [Path(parent, name).relative_to(folder) for name in names if name.endswith(".py")]
    return sorted(found)


def stdlib_documents(folder: Path, *, max_bytes: int, seed: int) -> Iterator[Document]:
    """Yield modules in the shuffled order, each that still fits into `max_bytes` of UTF-8 text in all.

    Modules that are empty or not UTF-8 are left out.

    Raises:
        DataError: the folder holds no module that fits.
    """

    def shuffle_key(relative: Path) -> bytes:
        # It depends on nothing but the seed and the path, so that a new module does not change the order of the others.
        return hashlib.sha256(f"{seed}:{relative.as_posix()}".encode()).digest()

    total_bytes = 0
    for relative in sorted(find_modules(folder), key=shuffle_key):
        try:
            text = (folder / relative).read_bytes().decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        num_bytes = len(text.encode("utf-8"))
        if not text.strip() or total_bytes + num_bytes > max_bytes:
            continue
        total_bytes += num_bytes
        yield Document(text, relative.as_posix())
    if total_bytes == 0:
        raise DataError(
            f"No Python module was found in {folder} with at most {max_bytes} bytes. Is the standard library installed "
            "as .py files? Otherwise raise --max-bytes."
        )


def write_stdlib_corpus(
    path: Path, *, folder: Optional[Path] = None, max_bytes: int = DEFAULT_MAX_BYTES, seed: int = 1234
) -> CorpusSummary:
    """Write the corpus as JSON lines `{"text": ..., "source": ...}`, atomically.

    A file with the same bytes keeps its modification time, so that what was made from it stays valid.

    Args:
        path: the JSONL file.
        folder: where to search for modules; None: the running interpreter's standard library.
        max_bytes: limit on the bytes of UTF-8 text.
        seed: seed of the order of the documents.

    Raises:
        DataError: no module was found.
        OSError: the file cannot be written.
    """
    lines, text_bytes = [], 0
    for document in stdlib_documents(folder or stdlib_folder(), max_bytes=max_bytes, seed=seed):
        line = json.dumps({"text": document.text, "source": document.source}, ensure_ascii=False) + "\n"
        lines.append(line.encode("utf-8"))
        text_bytes += len(document.text.encode("utf-8"))
    content = b"".join(lines)
    changed = not path.is_file() or path.read_bytes() != content
    if changed:
        with atomic_write(path) as stream:
            stream.write(content)
    return CorpusSummary(path, len(lines), text_bytes, changed)
