"""A text corpus that every machine has: the source of Python's own standard library.

Real code and English prose (comments, docstrings), about 10 MB, no network and no licence to accept. One document is
one module. The order of the documents is a fixed shuffle: Megatron's `--split` gives validation the last documents, so
validation holds other modules than training but the same kind of text.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megafp8.errors import DataError
from megafp8.utils.files import publish, sync, temporary_name

DEFAULT_MAX_BYTES = 10_000_000

# Installed packages are not the standard library; tests hold odd encodings and generated data; `encodings` is tables of
# code points; lib2to3 holds Python 2 and broken files on purpose.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "lib2to3"}
)


@dataclass(frozen=True)
class Document:
    """One module: its text and its path below the standard library's folder, with forward slashes."""

    text: str
    source: str


@dataclass(frozen=True)
class CorpusSummary:
    """What a corpus file holds. `changed` is False when the file was there already with the same bytes."""

    path: Path
    num_documents: int
    text_bytes: int
    changed: bool


def stdlib_folder() -> Path:
    """Return the folder of the standard library of the running interpreter."""
    return Path(sysconfig.get_path("stdlib"))


def find_modules(folder: Path) -> list[Path]:
    """Return the `.py` files below `folder` that belong in the corpus, as relative paths in sorted order."""
    relative = (path.relative_to(folder) for path in folder.rglob("*.py"))
    return sorted(path for path in relative if SKIPPED_FOLDERS.isdisjoint(path.parts[:-1]))


def read_document(folder: Path, relative: Path) -> Optional[Document]:
    """Read one module; None when it is empty or not UTF-8."""
    try:
        text = (folder / relative).read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    text = text.replace("\r\n", "\n")
    return Document(text, relative.as_posix()) if text.strip() else None


def shuffle_key(source: str, seed: int) -> bytes:
    """Sort key of a document. It depends on nothing but seed and path: one module more or less moves no other."""
    return hashlib.sha256(f"{seed}:{source}".encode()).digest()


def stdlib_documents(folder: Path, *, max_bytes: int, seed: int) -> Iterator[Document]:
    """Yield modules in the shuffled order, each that still fits into `max_bytes` of UTF-8 text in all.

    Raises:
        DataError: the folder holds no module that fits.
    """
    relatives = sorted(find_modules(folder), key=lambda path: shuffle_key(path.as_posix(), seed))
    total_bytes = 0
    for relative in relatives:
        document = read_document(folder, relative)
        if document is None:
            continue
        num_bytes = len(document.text.encode("utf-8"))
        if total_bytes + num_bytes > max_bytes:
            continue
        total_bytes += num_bytes
        yield document
    if total_bytes == 0:
        raise DataError(
            f"No Python module was found in {folder} that fits into {max_bytes} bytes. "
            "Is the standard library installed as .py files? Otherwise raise --max-bytes."
        )


def write_stdlib_corpus(
    path: Path, *, folder: Optional[Path] = None, max_bytes: int = DEFAULT_MAX_BYTES, seed: int = 1234
) -> CorpusSummary:
    """Write the corpus as JSON lines `{"text": ..., "source": ...}`, whole or not at all.

    A file that is there with the same bytes keeps its modification time, so that what was made from it stays valid.

    Args:
        path: the JSONL file.
        folder: where to look for modules; default the running interpreter's standard library.
        max_bytes: most bytes of UTF-8 text.
        seed: of the order of the documents.

    Raises:
        DataError: no module was found.
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    num_documents = text_bytes = 0
    digest = hashlib.sha256()
    try:
        with open(temporary, "wb") as stream:
            for document in stdlib_documents(folder or stdlib_folder(), max_bytes=max_bytes, seed=seed):
                line = json.dumps({"text": document.text, "source": document.source}, ensure_ascii=False)
                encoded = line.encode("utf-8") + b"\n"
                stream.write(encoded)
                digest.update(encoded)
                num_documents += 1
                text_bytes += len(document.text.encode("utf-8"))
            sync(stream)
        changed = not (path.is_file() and hashlib.sha256(path.read_bytes()).digest() == digest.digest())
        if changed:
            publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return CorpusSummary(path, num_documents, text_bytes, changed)
