"""The pipeline of Megatron-LM's preprocess_data.py, for comparison: a pool of processes tokenizes one document per
call, and the parent process writes the results with megatron-core's IndexedDatasetBuilder.

Tokenizers are megatron-core's own classes, except for Hugging Face's, whose class needs `transformers`: the library
`tokenizers` is called in the same way.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
warnings.filterwarnings("ignore")  # megatron-core's, of what is not installed
logging.disable(logging.WARNING)

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer

CHUNK_DOCUMENTS = 32  # Megatron's


class Encoder:
    """One line of JSON to token ids, as Megatron's class of that name."""

    def __init__(self, options: argparse.Namespace):
        self._options = options

    def initializer(self) -> None:
        """Build the tokenizer, once a process."""
        Encoder.tokenize, Encoder.eod, Encoder.vocab_size = build(self._options)

    def encode(self, line: str) -> tuple[list[int], list[int], int]:
        """Return ids, lengths of the sequences and bytes."""
        ids = Encoder.tokenize(json.loads(line)["text"])
        lengths = [len(ids)] if ids else []
        if ids:
            ids.append(Encoder.eod)
            lengths[-1] += 1
        return ids, lengths, len(line)


def build(options: argparse.Namespace) -> tuple[Callable[[str], list[int]], int, int]:
    """How to tokenize, the id that ends a document, and the number of ids."""
    if options.tokenizer_type == "HuggingFaceTokenizer":
        from megafp8.data.tokenizers.libraries import HuggingFaceTokenizer

        tokenizer = HuggingFaceTokenizer(options.tokenizer_model)
    else:
        tokenizer = build_tokenizer(options)
    return tokenizer.tokenize, tokenizer.eod, tokenizer.vocab_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("--input", "--output-prefix", "--tokenizer-type", "--tokenizer-model"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--vocab-size", type=int)
    options = parser.parse_args()
    # What Megatron's other flags say by default.
    options.tokenizer_metadata = options.tokenizer_special_tokens = options.tiktoken_pattern = None
    options.tokenizer_sentencepiece_legacy, options.tiktoken_num_special_tokens = False, 1000

    encoder = Encoder(options)
    encoder.initializer()
    prefix = f"{options.output_prefix}_text_document"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(Encoder.vocab_size))
    with (
        open(options.input, encoding="utf-8") as lines,
        multiprocessing.Pool(options.workers, initializer=encoder.initializer) as pool,
    ):
        for ids, lengths, _ in pool.imap(encoder.encode, lines, CHUNK_DOCUMENTS):
            builder.add_document(ids, lengths)
        pool.close()
        pool.join()
    builder.finalize(f"{prefix}.idx")


if __name__ == "__main__":
    main()
