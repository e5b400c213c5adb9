"""Turn text into token shards (.bin/.idx) that megafp8 and Megatron-LM train on.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix shards/corpus --append-eod --workers 2 \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model

writes shards/corpus_text_document.bin, .idx and .manifest.json; the same command again does nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout, installed or not

from tqdm import tqdm

from megafp8.data.preprocess import PreprocessJob, PreprocessSummary, Progress, preprocess
from megafp8.data.readers import expand_inputs
from megafp8.data.tokenizer_flags import add_tokenizer_flags, read_tokenizer_flags
from megafp8.errors import Megafp8Error

# Megatron's flags that its way of splitting the work needs and ours does not.
UNNEEDED_FLAGS = {
    "--partitions": "the work is split over --workers alone",
    "--log-interval": "progress is always shown",
}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser, with the names that Megatron's preprocess_data.py has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, help=".jsonl, .json, .txt (each also .gz), or patterns")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX_KEY_document.bin, .idx, .manifest.json")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="where the text is, one shard each (text)")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes that tokenize (default %(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="make shards again that are there")
    add_tokenizer_flags(parser)
    for flag, reason in UNNEEDED_FLAGS.items():
        parser.add_argument(flag, type=int, help=f"accepted from Megatron's command lines without effect: {reason}")
    return parser


def run_with_progress(job: PreprocessJob) -> PreprocessSummary:
    """Run the job under a progress bar (on a terminal) that counts input bytes."""
    total_bytes = sum(path.stat().st_size for path in expand_inputs(job.inputs))
    with tqdm(total=total_bytes, unit="B", unit_scale=True, disable=None, desc="tokenizing") as bar:

        def show(progress: Progress) -> None:
            elapsed_s = max(bar.format_dict["elapsed"], 1e-9) if not bar.disable else 1.0
            bar.set_postfix_str(f"{progress.num_tokens / elapsed_s / 1e6:.2f}M tokens/s", refresh=False)
            bar.update(progress.input_bytes - bar.n)

        return preprocess(job, on_progress=show)


def print_summary(summary: PreprocessSummary, seconds: float) -> None:
    """Print a line a shard, and the speed."""
    for prefix, manifest in summary.shards:
        state = "" if summary.made else " is there already, from the same text and tokenizer"
        print(
            f"{prefix}{state}: {manifest.num_documents} documents, {manifest.num_tokens} tokens, "
            f"{manifest.bin_bytes / 1e6:.1f} MB"
        )
    if summary.made:
        num_tokens = sum(manifest.num_tokens for _, manifest in summary.shards)
        first = summary.shards[0][1]
        text_mb = sum(source["bytes"] for source in first.sources) / 1e6
        print(
            f"{seconds:.1f} s: {first.num_documents / seconds:.0f} documents/s, {num_tokens / seconds:.0f} tokens/s, "
            f"{text_mb / seconds:.2f} MB/s of input"
        )


def main(argv: Optional[list[str]] = None) -> int:
    """Run the command line; return its exit status."""
    options = build_parser().parse_args(argv)
    for flag, reason in UNNEEDED_FLAGS.items():
        if getattr(options, flag[2:].replace("-", "_")) is not None:
            print(f"{flag} has no effect: {reason}", file=sys.stderr)
    tokenizer, vocab_size = read_tokenizer_flags(options)
    job = PreprocessJob(
        inputs=tuple(options.input),
        output_prefix=options.output_prefix,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        json_keys=tuple(options.json_keys),
        append_eod=options.append_eod,
        workers=options.workers,
        overwrite=options.overwrite,
    )
    start = time.perf_counter()
    try:
        summary = run_with_progress(job)
    except Megafp8Error as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except OSError as error:
        print(f"Reading --input or writing --output-prefix failed: {error}", file=sys.stderr)
        return 74
    print_summary(summary, time.perf_counter() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
