"""Summarize and verify token shards.

    megafp8 inspect-shards shards/corpus_text_document
    megafp8 inspect-shards shards/*.idx --verify --documents 0
    megafp8 inspect-shards theirs --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json

Counts and lengths come from the index. --verify reads every byte, and checks the index against the
tokens, every id against the vocabulary, and both files against the hashes in the manifest. The exit status is 66 for
damaged shards.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from megafp8.analysis.plotting import picture_problems
from megafp8.cli import common
from megafp8.cli.command_flags import add_flags, argument, int_flag, path_flag, switch
from megafp8.config import derived
from megafp8.data.shard_summary import ShardSummary, read_documents, summarize_shard
from megafp8.data.shard_verification import ShardCheckResult, failures, verify_shard
from megafp8.data.shards import bin_path
from megafp8.data.tokenizers.build import build_tokenizer, describe_tokenizer, tokenizer_from_settings
from megafp8.errors import ConfigError, DataError
from megafp8.utils.files import path_text

if TYPE_CHECKING:
    from megafp8.data.tokenizers.build import Tokenizer

BAR = 40
STATE = {True: "ok", False: "WRONG", None: "-"}


def build_parser() -> argparse.ArgumentParser:
    parser = add_flags(
        common.build_command_parser(__doc__),
        argument("shards", "path of a shard, without .bin or .idx", nargs="+", type=path_text, metavar="PREFIX"),
        switch("--verify", "read and check every byte"),
        int_flag("--documents", "number of first documents to show (default: 3)", default=3),
        int_flag("--max-tokens", "tokens to show of each document (default: 100)", default=100),
        path_flag("--plot", "plot the lengths of documents to F (.png, .svg, .pdf)", metavar="F"),
        switch("--json", "print JSON instead of text"),
    )  # fmt: skip
    common.add_tokenizer_flags(parser, "for the text of documents (default: the tokenizer in the manifest)")
    return parser


def tokenizer_for(options: argparse.Namespace, summary: ShardSummary) -> tuple[Optional[Tokenizer], str]:
    """Return the tokenizer of the flags, else of the manifest; or None and the reason why there is none.

    Raises:
        DataError: the flags name a different tokenizer than the manifest does.
    """
    manifest = summary.manifest
    data, vocab_size = common.read_tokenizer_flags(options)
    if derived.tokenizer_type(data) is not None:
        tokenizer = build_tokenizer(data, vocab_size)
    elif manifest is None or not manifest.tokenizer_settings:
        return None, "no manifest names its tokenizer; give --tokenizer-type and what it needs"
    else:
        try:
            tokenizer = tokenizer_from_settings(manifest.tokenizer_settings)
        except (ConfigError, DataError) as error:
            return None, f"the tokenizer that the manifest names cannot be built here: {error}"
    if manifest is not None and manifest.tokenizer not in (None, dict(tokenizer.unique_identifiers)):
        message = (
            f"Shard {summary.prefix} was made with {describe_tokenizer(manifest.tokenizer)}, which is not "
            f"{describe_tokenizer(tokenizer.unique_identifiers)}"
        )
        if derived.tokenizer_type(data) is not None:
            raise DataError(f"{message}.")
        return None, f"{message}: its files have changed since"
    return tokenizer, ""


def first_documents(options: argparse.Namespace, summary: ShardSummary) -> list[dict[str, Any]]:
    """Return ids and text of the first documents, truncated to --max-tokens."""
    documents = read_documents(summary.prefix, 0, options.documents, options.max_tokens)
    tokenizer, why_not = tokenizer_for(options, summary) if documents else (None, "")
    if why_not:
        print(f"{summary.prefix}: {why_not}", file=sys.stderr)
    shown = []
    for ids in documents:
        tokens, text = ids.tolist(), None
        if tokenizer is not None and all(0 <= token < tokenizer.vocab_size for token in tokens):
            text = tokenizer.detokenize(tokens)
        shown.append({"ids": tokens, "text": text})
    return shown


def print_summary(summary: ShardSummary) -> None:
    """Print counts, manifest and histogram."""
    manifest = summary.manifest
    empty = f", {summary.num_empty:,} without tokens" if summary.num_empty else ""
    modes = ", with sequence modes" if summary.has_modes else ""
    print(summary.prefix)
    print(f"  format     Megatron's index, version {summary.version}, ids in {summary.dtype}{modes}")
    print(f"  tokens     {summary.num_tokens:,} in {summary.bin_bytes:,} bytes, index of {summary.idx_bytes:,} bytes")
    print(f"  documents  {summary.num_documents:,} in {summary.num_sequences:,} sequences{empty}")
    if manifest is None:
        print("  manifest   none: made by another program")
    else:
        ends = {True: "ended by its token", False: "not ended by a token", None: "unknown ends"}[manifest.append_eod]
        tokenizer = "unknown" if manifest.tokenizer is None else describe_tokenizer(manifest.tokenizer)
        print(f"  tokenizer  {tokenizer}")
        origin = f"from {len(manifest.sources)} files, key {manifest.json_key}"
        skipped = f", {manifest.num_skipped:,} records left out" if manifest.num_skipped else ""
        print(f"  manifest   documents {ends}, {origin}, encoded by {manifest.encoder or 'unknown'}{skipped}")
        for part in manifest.parts:
            last = part["first_document"] + part["num_documents"]
            print(f"  made from  documents {part['first_document']:,} to {last:,} of {part['prefix']}")
    if summary.quantiles:
        shares = ", ".join(f"{length:,} ({share:.0%})" for share, length in summary.quantiles.items())
        print(f"  lengths    {summary.shortest:,} to {summary.longest:,} tokens; {shares}")
    print_histogram(summary)


def print_histogram(summary: ShardSummary) -> None:
    """Print a bar for the document lengths of each power of two."""
    if not summary.bins:
        return
    most = max(each.num_documents for each in summary.bins)
    labels = [f"{each.low:,} to {each.high:,}" if each.high > each.low else f"{each.low:,}" for each in summary.bins]
    width = max(map(len, labels))
    print(f"\n  {'tokens':>{width}}  {'documents':>12}  of all  of tokens")
    for label, each in zip(labels, summary.bins, strict=True):
        bar = "#" * round(BAR * each.num_documents / most) or ("." if each.num_documents else "")
        of_all = each.num_documents / summary.num_documents
        of_tokens = each.num_tokens / summary.num_tokens if summary.num_tokens else 0
        print(f"  {label:>{width}}  {each.num_documents:>12,}  {of_all:>6.1%}  {of_tokens:>9.1%}  {bar}".rstrip())


def print_documents(documents: Sequence[dict[str, Any]]) -> None:
    """Print each document's text, or its ids where there is no tokenizer."""
    for number, document in enumerate(documents):
        print(f"\n  document {number}, first {len(document['ids'])} tokens")
        text = " ".join(map(str, document["ids"])) if document["text"] is None else document["text"]
        print("\n".join(f"    {line}" for line in text.splitlines()))


def print_results(results: Sequence[ShardCheckResult]) -> None:
    print()
    for result in results:
        print(f"  {STATE[result.passed]:>5}  {result.check}: {result.detail}")


def verify(options: argparse.Namespace, prefix: str) -> list[ShardCheckResult]:
    """Verify a shard under a progress bar."""
    data, vocab_size = common.read_tokenizer_flags(options)
    if derived.tokenizer_type(data) is not None:
        vocab_size = build_tokenizer(data, vocab_size).vocab_size
    total = bin_path(prefix).stat().st_size if bin_path(prefix).is_file() else 0
    with common.bytes_bar(total, desc="reading", leave=False) as bar:
        return verify_shard(prefix, vocab_size=vocab_size, on_progress=bar.update)


def inspect(options: argparse.Namespace, prefix: str) -> tuple[dict[str, Any], Optional[ShardSummary]]:
    """Inspect one shard; return its report for --json, and its summary if its index can be read."""
    results = verify(options, prefix) if options.verify else []
    report: dict[str, Any] = {"prefix": prefix}
    summary = None
    try:
        summary = summarize_shard(prefix)
        documents = first_documents(options, summary)
        report |= {"summary": dataclasses.asdict(summary), "documents": documents}
        if not options.json:
            print_summary(summary)
            print_documents(documents)
    except DataError as error:
        report["error"] = str(error)
        print(f"inspect_shards: {error}", file=sys.stderr)
    if options.verify:
        report["findings"] = [dataclasses.asdict(result) for result in results]
        report["is_sound"] = not failures(results)
        if not options.json:
            print_results(results)
    return report, summary


def draw(summaries: Sequence[ShardSummary], output: Path) -> Path:
    from megafp8.analysis.plots import LengthPanel, plot_lengths

    return plot_lengths(
        [
            LengthPanel(
                title=f"{summary.prefix}: {summary.num_documents:,} documents, {summary.num_tokens:,} tokens",
                labels=[str(each.low) if each.low == each.high else f"{each.low}-{each.high}" for each in summary.bins],
                num_documents=[each.num_documents for each in summary.bins],
                num_tokens=[each.num_tokens for each in summary.bins],
            )
            for summary in summaries
        ],
        output,
    )


@common.returns_exit_status("inspect-shards")
def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    options = build_parser().parse_args(argv)
    if problems := picture_problems("--plot", options.plot):
        raise ConfigError(problems)
    prefixes = list(dict.fromkeys(name.removesuffix(".bin").removesuffix(".idx") for name in options.shards))
    reports, summaries = [], []
    for prefix in prefixes:
        report, summary = inspect(options, prefix)
        reports.append(report)
        summaries += [] if summary is None else [summary]
    if options.plot is not None and summaries:
        print(f"wrote {draw(summaries, options.plot)}", file=sys.stderr)
    if options.json:
        print(json.dumps(reports, indent=2))
    is_wrong = any("error" in report or not report.get("is_sound", True) for report in reports)
    return DataError.exit_status if is_wrong else 0
