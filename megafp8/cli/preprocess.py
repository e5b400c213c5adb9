"""Turn text into token shards (.bin/.idx) that megafp8 and Megatron-LM train on.

    megafp8 preprocess --input corpus.jsonl --output-prefix shards/corpus --append-eod --workers 2 \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model

writes shards/corpus_text_document.bin, .idx and .manifest.json. Repeating the command does nothing; after an
interruption it resumes. Byte-pair tokenizers are encoded by gigatoken where it gives the same ids (pip install
-e '.[data]'). The first line of output names the encoder. Other flags of Megatron-LM's preprocess_data.py are ignored
or refused, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megafp8.cli import common
from megafp8.cli.command_flags import add_flags, argument, int_flag, switch
from megafp8.cli.progress_display import ProgressDisplay
from megafp8.data.preprocessing.sources import MAX_DOCUMENT_BYTES
from megafp8.data.tokenizers.build import AUTO, ENCODERS
from megafp8.errors import ConfigError
from megafp8.utils.files import path_text

if TYPE_CHECKING:
    from megafp8.data.preprocessing.plan import PreprocessJob
    from megafp8.data.preprocessing.preprocess import PreprocessSummary

# Flags of Megatron's preprocess_data.py that are accepted without effect: type of the value, and why.
UNNEEDED_FLAGS = {
    "--partitions": (int, "the work is split over --workers alone"),
    "--keep-sequential-samples": (None, "the order of the input is always kept"),
}
# Flags of Megatron's preprocess_data.py that are refused, and why.
REFUSED_FLAGS = {
    "--split-sentences": "sentences are for BERT and T5; a document of a GPT is one sequence",
    "--keep-newlines": "it goes with --split-sentences",
    "--lang": "it goes with --split-sentences",
    "--find-optimal-num-workers": "run with several --workers and compare the documents/s that are shown",
    "--workers-to-check": "it goes with --find-optimal-num-workers",
    "--max-documents": "it goes with --find-optimal-num-workers",
    "--performance-dir": "it goes with --find-optimal-num-workers",
}
SHOWN_SKIPPED = 5
_RESUMES = "What is done is kept beside the output: the same command resumes."


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; flags have the names of Megatron's preprocess_data.py."""
    parser = common.build_command_parser(__doc__)
    text = parser.add_argument_group("text")
    add_flags(
        text.add_mutually_exclusive_group(required=True),
        argument("--input", "files, folders or glob patterns: JSON lines (.jsonl, .json, .ndjson) and plain text "
                 "(.txt), each also with .gz or .zst, and Parquet (.parquet)", nargs="+", type=path_text, default=[],
                 metavar="NAME"),
        argument("--hf-dataset", "name of a Hugging Face dataset, downloaded if needed", metavar="NAME"),
    )  # fmt: skip
    add_flags(
        text,
        argument("--hf-dataset-config", "configuration of the dataset, such as sample-10BT", metavar="NAME"),
        argument("--hf-dataset-split", "split of the dataset (default: %(default)s)", default="train", metavar="NAME"),
        argument("--json-keys", "JSON keys or Parquet columns with text; one shard each (default: text)", nargs="+",
                 default=["text"], metavar="KEY"),
        argument("--text-separator", "separator of documents in a .txt file, such as '\\n' or '<|endoftext|>' "
                 "(default: each file is one document)", type=_unescape, metavar="TEXT"),
        int_flag("--max-document-bytes", "maximum size of a document, decompressed; a larger one is an error (default: "
                 "%(default)s)", default=MAX_DOCUMENT_BYTES),
        argument("--on-bad-document", "for broken JSON, a missing key, text that is not UTF-8 or ids beyond the "
                 "vocabulary: fail, or skip the document and list it in PREFIX.skipped.jsonl (default: %(default)s)",
                 choices=("fail", "skip"), default="fail"),
    )  # fmt: skip
    add_flags(
        parser.add_argument_group("shards"),
        argument("--output-prefix", "path prefix of PREFIX_KEY_document.bin, .idx, .manifest.json", type=path_text,
                 required=True),
        switch("--append-eod", "end each document with the end-of-document token"),
        switch("--overwrite", "replace existing shards"),
    )  # fmt: skip
    add_flags(
        parser.add_argument_group("work"),
        argument("--workers", "number of tokenizing processes (default: cores, here %(default)s)", type=int,
                 default=len(os.sched_getaffinity(0))),
        argument("--encoder", "encoder (default: %(default)s)", choices=ENCODERS, default=AUTO),
        int_flag("--log-interval", "documents between lines of progress outside a terminal (default: a line every 10 "
                 "seconds)", metavar="DOCUMENTS"),
    )  # fmt: skip
    common.add_tokenizer_flags(parser)
    for flag, (kind, _) in UNNEEDED_FLAGS.items():
        options = {"action": "store_true", "default": None} if kind is None else {"type": kind}
        parser.add_argument(flag, help=argparse.SUPPRESS, **options)
    for flag in REFUSED_FLAGS:
        parser.add_argument(flag, nargs="*", help=argparse.SUPPRESS)
    return parser


def read_job(options: argparse.Namespace) -> PreprocessJob:
    """Build the job from the flags.

    Raises:
        ConfigError: flags that are refused.
    """
    from megafp8.data.preprocessing.plan import PreprocessJob  # imports numpy, which is too slow for --help

    problems = [f"{flag}: {reason}." for flag, reason in REFUSED_FLAGS.items() if _is_given(options, flag)]
    if options.workers < 1:
        problems.append(f"--workers {options.workers} is less than 1.")
    if options.max_document_bytes < 1:
        problems.append(f"--max-document-bytes {options.max_document_bytes} is less than 1.")
    if problems:
        raise ConfigError(problems)
    tokenizer, vocab_size = common.read_tokenizer_flags(options)
    dataset = (options.hf_dataset, options.hf_dataset_config, options.hf_dataset_split) if options.hf_dataset else None
    return PreprocessJob(
        inputs=tuple(options.input), dataset=dataset, output_prefix=options.output_prefix, tokenizer=tokenizer,
        vocab_size=vocab_size, json_keys=tuple(dict.fromkeys(options.json_keys)),
        text_separator=options.text_separator, max_document_bytes=options.max_document_bytes,
        append_eod=options.append_eod, skip_bad=options.on_bad_document == "skip", encoder=options.encoder,
        workers=options.workers, overwrite=options.overwrite,
    )  # fmt: skip


def print_summary(summary: PreprocessSummary, output_prefix: str) -> None:
    """Print a line for each shard, and the first skipped records."""
    for prefix, manifest in summary.shards:
        state = "" if summary.made else " is there already, from the same text and tokenizer"
        print(
            f"{prefix}{state}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens, "
            f"{manifest.bin_bytes / 1e6:,.1f} MB"
        )
    num_skipped = summary.shards[0][1].num_skipped
    if num_skipped:
        from megafp8.data.preprocessing.assembly import skipped_path

        print(f"{num_skipped:,} records were skipped, see {skipped_path(output_prefix)}:")
        with open(skipped_path(output_prefix), encoding="utf-8") as stream:
            for line, _ in zip(stream, range(SHOWN_SKIPPED), strict=False):
                print(f"  {line.rstrip()}")


@common.returns_exit_status(prefix="")
def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    options = build_parser().parse_args(argv)
    from megafp8.data.preprocessing.preprocess import preprocess

    for flag, (_, reason) in UNNEEDED_FLAGS.items():
        if _is_given(options, flag):
            print(f"{flag} has no effect: {reason}", file=sys.stderr)
    start = time.perf_counter()
    display = ProgressDisplay(options.log_interval)
    try:
        with contextlib.closing(display):
            summary = preprocess(read_job(options), display, lambda message: print(message, flush=True))
    except OSError as error:
        print(f"Reading --input or writing --output-prefix failed: {error}\n{_RESUMES}", file=sys.stderr)
        return os.EX_IOERR
    except KeyboardInterrupt:
        print(f"Stopped. {_RESUMES}", file=sys.stderr)
        return common.INTERRUPTED
    print_summary(summary, options.output_prefix)
    if display.last is not None:
        seconds = time.perf_counter() - start
        print(f"{seconds:.1f} s: {display.speeds(display.last, seconds)}")
    return 0


def _is_given(options: argparse.Namespace, flag: str) -> bool:
    return getattr(options, flag[2:].replace("-", "_")) is not None


def _unescape(text: str) -> str:
    """Replace the escapes \\n, \\t, \\r and \\\\ in a text."""
    meanings = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    return re.sub(r"\\([ntr\\])", lambda found: meanings[found.group(1)], text)
