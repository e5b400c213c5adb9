"""Download text of FineWeb-Edu as Parquet files with the library `datasets`.

    python examples/fineweb_edu/download.py --output text --config sample-10BT --gigabytes 5

Documents are streamed in the order of the dataset, so that only the requested part is downloaded. Every file is
complete: an interrupted download resumes after the last file. `--dataset` can be any dataset with a column `text`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

FILE_BYTES = 512 << 20
BATCH_DOCUMENTS = 1000


def parse_arguments(argv: Optional[list[str]]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the files")
    parser.add_argument("--dataset", default="HuggingFaceFW/fineweb-edu", help="default %(default)s")
    parser.add_argument("--config", default="sample-10BT", help="part of the dataset (default %(default)s)")
    parser.add_argument("--split", default="train", help="default %(default)s")
    parser.add_argument("--gigabytes", type=float, help="gigabytes of text to download (default: all)")
    return parser.parse_args(argv)


def download(dataset: Any, folder: Path, max_bytes: Optional[float]) -> tuple[int, int]:
    """Write the texts of a streamed dataset to files of about 512 MB of text each.

    Args:
        dataset: of the library `datasets`, streaming, with a column `text`.
        folder: for the files; existing files are kept.
        max_bytes: total bytes of text, including existing files; None: the complete dataset.

    Returns:
        Documents and bytes of text in the folder.
    """
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(folder.glob("part-*.parquet"))
    done, done_bytes = 0, 0
    for path in files:
        metadata = parquet.ParquetFile(path).metadata
        done += metadata.num_rows
        done_bytes += int(metadata.metadata[b"text_bytes"])
    batches = dataset.select_columns(["text"]).skip(done).iter(batch_size=BATCH_DOCUMENTS)
    number = len(files)
    while max_bytes is None or done_bytes < max_bytes:
        wanted = FILE_BYTES if max_bytes is None else min(FILE_BYTES, max_bytes - done_bytes)
        texts, num_bytes = take(batches, wanted)
        if not texts:
            break
        table = pyarrow.table({"text": texts}).replace_schema_metadata({"text_bytes": str(num_bytes)})
        path = folder / f"part-{number:05d}.parquet"
        temporary = path.with_suffix(".tmp")
        parquet.write_table(table, temporary, row_group_size=10 * BATCH_DOCUMENTS, compression="zstd")
        os.replace(temporary, path)
        number, done, done_bytes = number + 1, done + len(texts), done_bytes + num_bytes
        print(f"{path}: {done:,} documents, {done_bytes / 1e9:.2f} GB of text", flush=True)
    return done, done_bytes


def take(batches: Iterator[dict[str, list[str]]], wanted_bytes: float) -> tuple[list[str], int]:
    """Take texts from batches until there are `wanted_bytes`; the batch in which that happens is taken whole."""
    texts: list[str] = []
    num_bytes = 0
    while num_bytes < wanted_bytes and (batch := next(batches, None)) is not None:
        texts += batch["text"]
        num_bytes += sum(len(text.encode("utf-8")) for text in batch["text"])
    return texts, num_bytes


def main(argv: Optional[list[str]] = None) -> int:
    """Run the command line; return its exit status."""
    options = parse_arguments(argv)
    try:
        import datasets
    except ImportError as error:
        print(f"datasets cannot be imported ({error}). Install it: pip install -e '.[datasets]'", file=sys.stderr)
        return 64
    try:
        dataset = datasets.load_dataset(options.dataset, options.config, split=options.split, streaming=True)
        num_documents, num_bytes = download(dataset, options.output, options.gigabytes and options.gigabytes * 1e9)
    except (OSError, ValueError) as error:  # no network, no such dataset, no space; the library raises subclasses
        print(f"{options.dataset} {options.config}: {type(error).__name__}: {error}", file=sys.stderr)
        print("The same command continues after the last complete file.", file=sys.stderr)
        return 74
    print(f"{options.output}: {num_documents:,} documents, {num_bytes / 1e9:.2f} GB of text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
