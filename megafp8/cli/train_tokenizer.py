"""Train a lossless tokenizer, and verify that decoding returns the text byte by byte.

    megafp8 train-tokenizer --input corpus.jsonl --vocab-size 8192 --model-prefix tokenizer
    megafp8 train-tokenizer --input corpus.jsonl --vocab-size 8192 --model-prefix gpt --model-type byte-bpe

bpe and unigram are SentencePiece models with byte fallback and without normalization: PREFIX.model, for
--tokenizer-type SentencePieceTokenizer. byte-bpe is the type of GPT-2's tokenizer: the folder
PREFIX, for HuggingFaceTokenizer (tokenizer.json) or GPT2BPETokenizer (vocab.json, merges.txt).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from megafp8.cli.command_flags import add_flags, argument, int_flag, switch
from megafp8.cli.common import build_command_parser, returns_exit_status
from megafp8.data.preprocessing import tokenizer_training
from megafp8.data.preprocessing.sources import MAX_DOCUMENT_BYTES
from megafp8.utils.files import path_or_url_text, path_text


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__),
        argument("--input", "text files, in the formats of megafp8 preprocess", nargs="+", type=path_or_url_text,
                 required=True),
        argument("--json-key", "key of the text in a JSON line (default: %(default)s)", default="text"),
        argument("--vocab-size", "number of ids, including 261 fixed ones (byte-bpe: 257)", type=int, required=True),
        argument("--model-prefix", "path prefix of the files to write", type=path_text, required=True,
                 metavar="PREFIX"),
        argument("--model-type", "type of model (default: %(default)s)", choices=tokenizer_training.MODEL_TYPES,
                 default="bpe"),
        int_flag("--max-text-bytes", "train on the first N bytes of text (default: all of it)"),
        int_flag("--max-document-bytes", "largest document, decompressed; a longer one is an error (default: "
                 "%(default)s)", default=MAX_DOCUMENT_BYTES),
        argument("--num-threads", "threads (default: %(default)s)", type=int, default=os.cpu_count() or 1),
        switch("--overwrite", "replace an existing model"),
    )  # fmt: skip


def train(options: argparse.Namespace) -> tokenizer_training.TrainingSummary:
    """Train a tokenizer of the type that --model-type names."""
    if options.model_type == tokenizer_training.BYTE_BPE:
        os.environ["RAYON_NUM_THREADS"] = str(options.num_threads)  # the library reads it once
    return tokenizer_training.train_tokenizer(
        options.input,
        options.model_prefix,
        vocab_size=options.vocab_size,
        model_type=options.model_type,
        json_key=options.json_key,
        max_text_bytes=options.max_text_bytes,
        max_document_bytes=options.max_document_bytes,
        num_threads=options.num_threads,
        overwrite=options.overwrite,
        on_message=print,
    )


@returns_exit_status(prefix="")
def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    options = build_parser().parse_args(argv)
    start = time.perf_counter()
    try:
        summary = train(options)
    except OSError as error:
        print(f"Reading --input or writing --model-prefix failed: {error}", file=sys.stderr)
        return os.EX_IOERR
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
