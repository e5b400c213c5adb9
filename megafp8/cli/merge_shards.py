"""Join or split token shards.

    megafp8 merge-shards --input a_text_document b_text_document --output-prefix all_text_document
    megafp8 merge-shards --input shards/ --output-prefix all --num-parts 8
    megafp8 merge-shards --input all --output-prefix all --split 99,1

Inputs are joined in their order. --num-parts, --documents-per-part and --split split the result between documents.
Tokens are copied as bytes, and every output has a manifest. Inputs are compared with their manifests first. Repeating
the command keeps existing outputs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from megafp8.cli.command_flags import add_flags, argument, int_flag, switch
from megafp8.cli.common import build_command_parser, bytes_bar, returns_exit_status
from megafp8.utils.files import path_text


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__),
        argument("--input", "shards, or folders of shards", nargs="+", type=path_text, required=True, metavar="PREFIX"),
        argument("--output-prefix", "path prefix of the outputs", type=path_text, required=True, metavar="PREFIX"),
        int_flag("--num-parts", "split into N shards with about equal numbers of tokens"),
        int_flag("--documents-per-part", "split into shards of N documents"),
        argument("--split", "split documents into _train, _valid and _test: 98,2 or 969,30,1", metavar="SHARES"),
        switch("--overwrite", "replace existing shards"),
        switch("--no-verify", "do not compare inputs with their manifests"),
        switch("--trust-missing-manifests", "assume that shards without a manifest have the tokenizer of the others"),
    )  # fmt: skip


@returns_exit_status("merge-shards")
def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    options = build_parser().parse_args(argv)
    from megafp8.data.shard_merge import MergeJob, find_shards, merge_shards
    from megafp8.data.shards import bin_path

    start = time.perf_counter()
    try:
        job = MergeJob(
            inputs=find_shards([name.removesuffix(".bin").removesuffix(".idx") for name in options.input]),
            output_prefix=options.output_prefix, num_parts=options.num_parts,
            documents_per_part=options.documents_per_part, split=options.split, overwrite=options.overwrite,
            is_verified=not options.no_verify, trust_missing_manifests=options.trust_missing_manifests,
        )  # fmt: skip
        passes = 1 + job.is_verified  # bytes are read once to verify, once to copy
        total = passes * sum(bin_path(prefix).stat().st_size for prefix in job.inputs if bin_path(prefix).is_file())
        with bytes_bar(total, desc="merging", leave=False) as bar:
            summary = merge_shards(job, on_progress=bar.update)
    except OSError as error:
        print(f"merge-shards: reading --input or writing --output-prefix failed: {error}", file=sys.stderr)
        return os.EX_IOERR
    for prefix, manifest in summary.shards:
        state = " is there already, from the same shards" if prefix in summary.unchanged else ""
        print(f"{prefix}{state}: {manifest.num_documents} documents, {manifest.num_tokens} tokens")
    num_bytes = sum(manifest.bin_bytes for prefix, manifest in summary.shards if prefix not in summary.unchanged)
    if num_bytes:
        seconds = time.perf_counter() - start
        print(f"{seconds:.1f} s: {num_bytes / seconds / 1e6:.0f} MB/s of tokens")
    return 0
