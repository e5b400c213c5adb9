"""Filter and deduplicate text with datatrove, for `megafp8 preprocess`: JSON lines in, Parquet out.

    pip install datatrove
    python examples/clean_with_datatrove.py --input data/raw --output data/clean --workers 8
    megafp8 preprocess --input data/clean/text --output-prefix data/corpus --append-eod \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model data/tokenizer.json

Short and repetitive documents are left out, then all but one of near duplicates (MinHash of word 5-grams). On a cluster
replace LocalPipelineExecutor by datatrove's SlurmPipelineExecutor, which takes the same pipelines. Repeating the
command keeps the tasks that are complete; `logs` lists them, with what each filter left out.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import JsonlReader, ParquetReader
from datatrove.pipeline.writers import ParquetWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.word_tokenizers import WordTokenizer

MIN_WORDS, MAX_REPEATED_LINES = 50, 0.3
WORD = re.compile(r"\w+")


class PlainWords(WordTokenizer):
    """Words between spaces and punctuation. datatrove's own tokenizers of languages need spaCy and others."""

    def word_tokenize(self, text: str) -> list[str]:
        return WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        return text.splitlines()

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [found.span() for found in re.finditer(r".+", text)]


def is_good(document: Document) -> bool:
    """Whether a document is long enough and does not repeat its lines."""
    lines = [line for line in document.text.splitlines() if line.strip()]
    repeated = 1 - len(set(lines)) / max(len(lines), 1)
    return len(WORD.findall(document.text)) >= MIN_WORDS and repeated <= MAX_REPEATED_LINES


def pipelines(source: str, output: Path, tasks: int) -> Iterator[tuple[str, list[PipelineStep], int]]:
    """Yield the stages in order: name, steps and number of tasks."""
    config = MinhashConfig(hash_config=HashConfig(hash_fc="sha1"))
    filtered, signatures, buckets, removed = (str(output / name) for name in ("filtered", "sigs", "buckets", "removed"))
    yield "filter", [JsonlReader(source), LambdaFilter(is_good), ParquetWriter(filtered)], tasks
    read = ParquetReader(filtered)
    yield "signatures", [read, MinhashDedupSignature(signatures, config=config, language=PlainWords())], tasks
    yield "buckets", [MinhashDedupBuckets(signatures, buckets, config=config)], config.num_buckets
    yield "clusters", [MinhashDedupCluster(buckets, removed, config=config)], 1
    yield "text", [read, MinhashDedupFilter(removed), ParquetWriter(str(output / "text"))], tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, help="folder of .jsonl files, each also with .gz or .zst")
    parser.add_argument("--output", type=Path, required=True, help="folder; the Parquet files are in its text/")
    parser.add_argument("--tasks", type=int, default=8, help="shares of the files (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    options = parser.parse_args()
    for name, steps, tasks in pipelines(options.input, options.output, options.tasks):
        logs = str(options.output / "logs" / name)
        LocalPipelineExecutor(steps, tasks=tasks, workers=options.workers, logging_dir=logs).run()


if __name__ == "__main__":
    main()
