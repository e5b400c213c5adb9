"""Train a lossless tokenizer and prove that it gives text back to the byte.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --model-prefix tokenizer
    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --model-prefix gpt --model-type byte-bpe

bpe and unigram are SentencePiece's, with bytes for what the vocabulary lacks and no normalization: PREFIX.model, for
--tokenizer-type SentencePieceTokenizer. byte-bpe is GPT-2's kind: the folder PREFIX, for HuggingFaceTokenizer
(tokenizer.json) or GPT2BPETokenizer (vocab.json, merges.txt).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout, installed or not

from megafp8.data.preprocessing.readers import MAX_DOCUMENT_BYTES
from megafp8.data.preprocessing.tokenizer_training import (
    BYTE_BPE,
    MODEL_TYPES,
    TrainingSummary,
    train_byte_bpe,
    train_sentencepiece,
)
from megafp8.errors import Megafp8Error
from megafp8.utils.files import path_text


def parse_arguments(argv: Optional[list[str]]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", nargs="+", type=path_text, required=True, help="text files as preprocess_data.py takes them"
    )
    parser.add_argument("--json-key", default="text", help="where the text is in a JSON line (default %(default)s)")
    parser.add_argument("--vocab-size", type=int, required=True, help="ids in all, 261 fixed ones among them (257)")
    parser.add_argument("--model-prefix", type=path_text, required=True, metavar="PREFIX", help="where to write it")
    parser.add_argument("--model-type", choices=MODEL_TYPES, default="bpe", help="default %(default)s")
    parser.add_argument(
        "--max-text-bytes", type=int, metavar="N", help="train on the first N bytes of text (default: all of it)"
    )
    parser.add_argument(
        "--max-document-bytes", type=int, default=MAX_DOCUMENT_BYTES, metavar="N",
        help="largest document, decompressed; a longer one is an error (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--num-threads", type=int, default=os.cpu_count() or 1, help="default %(default)s")
    parser.add_argument("--overwrite", action="store_true", help="train although another model is there")
    return parser.parse_args(argv)


def train(options: argparse.Namespace) -> TrainingSummary:
    """Train the kind of tokenizer that was asked for."""
    common = {
        "vocab_size": options.vocab_size, "json_key": options.json_key, "max_text_bytes": options.max_text_bytes,
        "max_document_bytes": options.max_document_bytes, "overwrite": options.overwrite, "on_notice": print,
    }  # fmt: skip
    if options.model_type == BYTE_BPE:
        os.environ["RAYON_NUM_THREADS"] = str(options.num_threads)  # read once by the library, when it starts to work
        return train_byte_bpe(options.input, options.model_prefix, **common)
    return train_sentencepiece(
        options.input, options.model_prefix, model_type=options.model_type, num_threads=options.num_threads, **common
    )


def main(argv: Optional[list[str]] = None) -> int:
    """Run the command line; return its exit status."""
    options = parse_arguments(argv)
    start = time.perf_counter()
    try:
        summary = train(options)
    except Megafp8Error as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except OSError as error:
        print(f"Reading --input or writing --model-prefix failed: {error}", file=sys.stderr)
        return 74
    if not summary.trained:
        print(f"{summary.model_path} is there already, from the same settings and inputs")
        return 0
    print(
        f"{summary.model_path}: {options.vocab_size} ids in {time.perf_counter() - start:.1f} s; "
        f"{summary.num_verified_documents} documents came back exactly"
    )
    if summary.num_lossy_documents:
        print(f"{summary.num_lossy_documents} documents hold U+2581, which SentencePiece turns into a space")
    return 0


if __name__ == "__main__":
    sys.exit(main())
