"""Input sources of preprocessing: finds the input files and determines their format.

A folder or glob pattern may also match files that tokenizers and preprocessing wrote. Those are not text and are left
out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from glob import glob, has_magic
from pathlib import Path
from typing import Any, Optional

from megafp8.errors import CapabilityError, DataError
from megafp8.utils.files import path_problem
from megafp8.utils.installation import pip_install
from megafp8.utils.object_store import ObjectFolder, fetch, is_url, local_path
from megafp8.utils.suggestions import hub_hint

JSONL, TEXT, PARQUET, DATASET = "jsonl", "text", "parquet", "dataset"
SUFFIXES = {".jsonl": JSONL, ".json": JSONL, ".ndjson": JSONL, ".txt": TEXT, ".parquet": PARQUET}
COMPRESSIONS = (".gz", ".zst")
KNOWN_SUFFIXES = f"{', '.join(SUFFIXES)} (but for Parquet each also with {' or '.join(COMPRESSIONS)})"
# A worker holds several copies of a document in memory.
MAX_DOCUMENT_BYTES = 256 << 20
# Files of Hugging Face tokenizers. GPT-2's own files have a word and a hyphen before theirs.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt",
)  # fmt: skip
TOOL_OUTPUT_SUFFIXES = ("-vocab.json", "-merges.txt", ".manifest.json", ".skipped.jsonl")


@dataclass(frozen=True)
class InputSource:
    """One input file, or one Hugging Face dataset.

    Attributes:
        path: path of the file, or name of the dataset.
        kind: JSONL, TEXT, PARQUET or DATASET.
        num_bytes: size of the file on disk.
        mtime_ns: modification time; 0 for a dataset.
        compression: ".gz", ".zst" or "".
        delimiter: bytes that end a record; None when the file is one record, or a table.
        fingerprint: distinguishes datasets of the same name.
        max_document_bytes: largest record of a file that is not a table, decompressed.
    """

    path: str
    kind: str
    num_bytes: int
    mtime_ns: int
    compression: str = ""
    delimiter: Optional[bytes] = None
    fingerprint: str = ""
    max_document_bytes: int = MAX_DOCUMENT_BYTES

    @property
    def is_table(self) -> bool:
        """Whether `table_readers` reads it."""
        return self.kind in (PARQUET, DATASET)

    @property
    def is_divisible(self) -> bool:
        """Whether byte ranges of the file can be read independently."""
        return not self.compression and self.delimiter is not None and not overlaps_itself(self.delimiter)

    @property
    def record_name(self) -> str:
        """Name of a record in messages, where records are counted from 1."""
        if self.is_table:
            return "row"
        return "line" if self.delimiter == b"\n" else "document"

    def describe(self) -> dict[str, Any]:
        """Return its entry in a manifest. The content is not hashed: that would be one more pass over the input."""
        description: dict[str, Any] = {"path": self.path, "bytes": self.num_bytes, "mtime_ns": self.mtime_ns}
        if self.kind == TEXT and self.delimiter is not None:
            description["separator"] = self.delimiter.decode("utf-8")
        if self.fingerprint:
            description["fingerprint"] = self.fingerprint
        return description


def find_sources(
    inputs: Sequence[str],
    text_separator: Optional[str] = None,
    on_message: Callable[[str], None] = lambda _: None,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
) -> list[InputSource]:
    """Return the input files: in the order of `inputs`, and sorted within a folder or a pattern.

    Args:
        inputs: files, folders (searched recursively for files of a known kind) and glob patterns. Folders and patterns
            leave out files that tokenizers and preprocessing wrote.
        text_separator: separates the documents of a text file; None: each text file is one document.
        on_message: called with a message about files that are left out.
        max_document_bytes: largest line or text that is read.

    Raises:
        DataError: a name without a file, a file that is named twice, an unknown kind of file, an empty separator, or a
            text file that is one document of more than `max_document_bytes`. All problems are in one error.
    """
    if text_separator == "":
        raise DataError("--text-separator is empty. Remove it if each text file is one document.")
    sources: list[InputSource] = []
    found: set[str] = set()
    problems: list[str] = []
    for name in inputs:
        matches, left_out = _find_files(name)
        if left_out:
            on_message(
                f"--input {name}: ignored {len(left_out)} files written by tokenizers or preprocessing, such as "
                f"{left_out[0]}; to read such a file, give its path"
            )
        if not matches:
            kinds = f" of a supported type: {KNOWN_SUFFIXES}" if Path(name).is_dir() else ""
            dataset = f"; a dataset of the Hugging Face hub is --hf-dataset {name}" if hub_hint(name) else ""
            problems.append(f"--input {name}: no such file{kinds}{dataset}.")
        repeated = [path for path in matches if os.path.realpath(path) in found]
        found.update(map(os.path.realpath, matches))
        if repeated:
            more = f" and {len(repeated) - 1} more" if len(repeated) > 1 else ""
            problems.append(
                f"--input {name}: {repeated[0]}{more} is given twice. To train on some text more often, give its shard "
                "a larger weight in --data-path."
            )
        for path in matches:
            try:
                sources.append(_build_source(path, text_separator, max_document_bytes))
            except DataError as error:
                problems.append(f"--input {path}: {error}")
            except OSError as error:
                problems.append(f"--input {path}: {error.strerror}")
    if problems:
        raise DataError("\n".join(problems))
    return sources


def overlaps_itself(delimiter: bytes) -> bool:
    """Whether a delimiter can begin inside another one, so that a reader that starts between two finds others."""
    return any(delimiter.startswith(delimiter[shift:]) for shift in range(1, len(delimiter)))


def import_zstd(path: str) -> Any:
    """Import the Zstandard library, which `path` needs.

    Raises:
        CapabilityError: it is not installed.
    """
    try:
        from backports import zstd
    except ImportError as error:
        raise CapabilityError(
            f"{path} is compressed with Zstandard, which needs the package backports.zstd ({error}). "
            f"Install it: {pip_install('data')}"
        ) from error
    return zstd


def _find_files(name: str) -> tuple[list[Path], list[Path]]:
    """The files that an --input names, and the matching files that are left out."""
    if is_url(name):
        return _download(name), []
    if Path(name).is_dir():
        found = sorted(path for path in Path(name).rglob("*") if path.is_file() and _kind_of(path.name) is not None)
    elif has_magic(name) and not Path(name).exists():
        found = [Path(path) for path in sorted(glob(name, recursive=True)) if Path(path).is_file()]
    else:
        return [Path(name)] if Path(name).is_file() else [], []
    left_out = [path for path in found if _is_tool_output(path)]
    return [path for path in found if path not in set(left_out)], left_out


def _download(url: str) -> list[Path]:
    """Copy an object, those of a folder or those that match a pattern to the local cache.

    Raises:
        DataError: they cannot be read.
    """
    names = url.split("/")
    first = next((number for number, name in enumerate(names) if has_magic(name)), len(names) - 1)
    try:
        folder = ObjectFolder("/".join(names[:first]))
        name = "/".join(names[first:])
        if has_magic(name):
            found = {each: info for each, info in folder.find().items() if fnmatch(each, name)}
        elif info := folder.info(name):
            found = {name: info}
        else:
            found = {each: info for each, info in folder.find(name).items() if _kind_of(each)}
        places = {each: local_path(folder.name_of(each)) for each in sorted(found)}
        for each, place in places.items():
            fetch(folder, each, place, found[each])
    except OSError as error:
        raise DataError(f"--input {error}") from error
    return [place for place in places.values() if not _is_tool_output(place)]


def _is_tool_output(path: Path) -> bool:
    """Whether a file's name, or a file next to it, shows that a tokenizer or a preprocessing job wrote it."""
    return (
        path.name in TOKENIZER_FILES
        or path.name.endswith(TOOL_OUTPUT_SUFFIXES)
        or path.parent.suffix == ".parts"
        # The record of `tokenizer_training`: PREFIX.json next to PREFIX.model, or training.json in the folder.
        or (path.name == "training.json" and path.with_name("tokenizer.json").exists())
        or (path.suffix == ".json" and path.with_suffix(".model").exists())
    )


def _kind_of(name: str) -> Optional[tuple[str, str]]:
    """Kind and compression that the suffixes of a file name stand for; None for unknown suffixes."""
    compression = next((suffix for suffix in COMPRESSIONS if name.endswith(suffix)), "")
    kind = SUFFIXES.get(Path(name[: len(name) - len(compression)]).suffix)
    return None if kind is None or (kind == PARQUET and compression) else (kind, compression)


def _build_source(path: Path, text_separator: Optional[str], max_document_bytes: int) -> InputSource:
    if problem := path_problem(str(path)):
        raise DataError(f"{problem}. Rename the file.")
    found = _kind_of(path.name)
    if found is None:
        raise DataError(f"unsupported file type; supported suffixes are {KNOWN_SUFFIXES}.")
    kind, compression = found
    delimiter = b"\n" if kind == JSONL else None
    if kind == TEXT and text_separator is not None:
        delimiter = text_separator.encode("utf-8")
    status = path.stat()
    if kind == TEXT and delimiter is None and status.st_size > max_document_bytes:
        raise DataError(
            f"it has {status.st_size} bytes, and without --text-separator a text file is one document (of at most "
            f"{max_document_bytes} bytes). Set the separator of documents, for example --text-separator '\\n', or "
            "raise --max-document-bytes."
        )
    if compression == ".zst":
        import_zstd(str(path))
    return InputSource(
        str(path), kind, status.st_size, status.st_mtime_ns, compression, delimiter,
        max_document_bytes=max_document_bytes,
    )  # fmt: skip
