"""Turn text into token shards (.bin/.idx) that megafp8 and Megatron-LM train on.

    megafp8 preprocess --input corpus.jsonl --output-prefix shards/corpus --append-eod --workers 2 \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model

writes shards/corpus_text_document.bin, .idx and .manifest.json. Repeating the command does nothing; after an
interruption it resumes. N machines with one file system divide the work:

    megafp8 preprocess FLAGS --part 1/N                   on each of them, with its number
    megafp8 preprocess --output-prefix P --show-parts     how far they are
    megafp8 preprocess FLAGS --merge-parts                at the end: the same shards as from one machine

Byte-pair tokenizers are encoded by gigatoken where it gives the same ids (pip install -e '.[data]'). The first line of
output names the encoder. Other flags of Megatron-LM's preprocess_data.py are ignored or refused, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional, Union

from megafp8.cli import common
from megafp8.cli.command_flags import add_flags, argument, int_flag, switch
from megafp8.cli.progress_display import ProgressDisplay
from megafp8.data.preprocessing.sources import MAX_DOCUMENT_BYTES
from megafp8.data.tokenizers.build import AUTO, ENCODERS
from megafp8.errors import ConfigError
from megafp8.utils.files import path_or_url_text, path_text

if TYPE_CHECKING:
    from megafp8.data.preprocessing.plan import PreprocessJob
    from megafp8.data.preprocessing.preprocess import PreprocessSummary
    from megafp8.data.preprocessing.shares import Share, ShareProgress

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


def build_parser(requires_input: bool = True) -> argparse.ArgumentParser:
    """Build the parser; flags have the names of Megatron's preprocess_data.py."""
    parser = common.build_command_parser(__doc__)
    text = parser.add_argument_group("text")
    add_flags(
        text.add_mutually_exclusive_group(required=requires_input),
        argument("--input", "files, folders or glob patterns: JSON lines (.jsonl, .json, .ndjson) and plain text "
                 "(.txt), each also with .gz or .zst, and Parquet (.parquet)", nargs="+", type=path_or_url_text,
                 default=[], metavar="NAME"),
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
    machines = parser.add_argument_group("several machines", "that see the same files; see docs/data.md")
    add_flags(
        machines.add_mutually_exclusive_group(),
        argument("--part", "make part I of N, numbered from 1, and keep it for --merge-parts", metavar="I/N"),
        switch("--merge-parts", "make the shards from the parts of all machines"),
        switch("--show-parts", "print the progress of all parts, and do nothing; needs only --output-prefix"),
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
    if options.part is not None and read_share(options.part) is None:
        problems.append(f"--part {options.part}: must be I/N with I from 1 to N, such as 1/8.")
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


def read_share(text: str) -> Optional[Share]:
    """Return the share that --part names; None if it is not one."""
    from megafp8.data.preprocessing.shares import Share

    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    share = Share(int(found[1]), int(found[2])) if found else None
    return share if share is not None and 1 <= share.number <= share.count else None


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
    options = build_parser(requires_input="--show-parts" not in argv).parse_args(argv)
    if options.show_parts:
        from megafp8.data.preprocessing.shares import describe_progress, read_progress

        print(*describe_progress(read_progress(options.output_prefix)), sep="\n")
        return 0
    for flag, (_, reason) in UNNEEDED_FLAGS.items():
        if _is_given(options, flag):
            print(f"{flag} has no effect: {reason}", file=sys.stderr)
    start = time.perf_counter()
    display = ProgressDisplay(options.log_interval)
    try:
        with contextlib.closing(display):
            made = _run(options, display)
    except OSError as error:
        print(f"Reading --input or writing --output-prefix failed: {error}\n{_RESUMES}", file=sys.stderr)
        return os.EX_IOERR
    except KeyboardInterrupt:
        print(f"Stopped. {_RESUMES}", file=sys.stderr)
        return common.INTERRUPTED
    _print_made(made, options)
    if display.last is not None:
        seconds = time.perf_counter() - start
        print(f"{seconds:.1f} s: {display.speeds(display.last, seconds)}")
    return 0


def _run(options: argparse.Namespace, display: ProgressDisplay) -> Union[PreprocessSummary, ShareProgress]:
    from megafp8.data.preprocessing.preprocess import make_share, merge_shares, preprocess

    def on_message(message: str) -> None:
        print(message, flush=True)

    job = read_job(options)
    if options.part is not None and (share := read_share(options.part)) is not None:
        return make_share(job, share, display, on_message)
    return merge_shares(job, on_message) if options.merge_parts else preprocess(job, display, on_message)


def _print_made(made: Union[PreprocessSummary, ShareProgress], options: argparse.Namespace) -> None:
    from megafp8.data.preprocessing.preprocess import PreprocessSummary

    if isinstance(made, PreprocessSummary):
        print_summary(made, options.output_prefix)
    else:
        print(
            f"part {options.part} is complete: {made.num_documents:,} documents, {made.num_tokens:,} tokens. When all "
            "are, run the same command with --merge-parts in place of --part."
        )


def _is_given(options: argparse.Namespace, flag: str) -> bool:
    return getattr(options, flag[2:].replace("-", "_")) is not None


def _unescape(text: str) -> str:
    """Replace the escapes \\n, \\t, \\r and \\\\ in a text."""
    meanings = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    return re.sub(r"\\([ntr\\])", lambda found: meanings[found.group(1)], text)
