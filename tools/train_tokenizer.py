"""Train a lossless SentencePiece tokenizer (byte fallback, no normalization) and prove that it gives text back.

python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 8192 --model-prefix tokenizer
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout, installed or not

from megafp8.data.tokenizer_training import MODEL_TYPES, train_sentencepiece
from megafp8.errors import Megafp8Error


def parse_arguments(argv: Optional[list[str]]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, help="JSONL (.gz too) or text files, or glob patterns")
    parser.add_argument("--json-key", default="text", help="where the text is in a JSON line (default %(default)s)")
    parser.add_argument("--vocab-size", type=int, required=True, help="pieces in all, 261 fixed ones among them")
    parser.add_argument("--model-prefix", required=True, help="writes PREFIX.model, PREFIX.vocab and PREFIX.json")
    parser.add_argument("--model-type", choices=MODEL_TYPES, default="bpe", help="default %(default)s")
    parser.add_argument("--num-threads", type=int, default=os.cpu_count() or 1, help="default %(default)s")
    parser.add_argument("--overwrite", action="store_true", help="train although another model is there")
    return parser.parse_args(argv)


def main(argv: Optional[list[str]] = None) -> int:
    """Run the command line; return its exit status."""
    options = parse_arguments(argv)
    start = time.perf_counter()
    try:
        summary = train_sentencepiece(
            options.input,
            options.model_prefix,
            vocab_size=options.vocab_size,
            model_type=options.model_type,
            json_key=options.json_key,
            num_threads=options.num_threads,
            overwrite=options.overwrite,
        )
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
        f"{summary.model_path}: {options.vocab_size} pieces in {time.perf_counter() - start:.1f} s; "
        f"{summary.num_verified_documents} documents came back exactly"
    )
    if summary.num_lossy_documents:
        print(f"{summary.num_lossy_documents} documents hold U+2581, which SentencePiece turns into a space")
    return 0


if __name__ == "__main__":
    sys.exit(main())
