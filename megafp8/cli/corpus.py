r"""Write a text corpus from this machine's Python standard library, without network: JSON lines, a document per module.

    megafp8 corpus --output corpus.jsonl

--folder takes the modules of another folder, such as the installed packages for more text:

    megafp8 corpus --output corpus.jsonl --max-bytes 80000000 \
      --folder "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megafp8.cli.command_flags import add_flags, argument, path_flag
from megafp8.cli.common import build_command_parser, returns_exit_status
from megafp8.data.preprocessing.corpus import DEFAULT_MAX_BYTES, write_stdlib_corpus


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__),
        path_flag("--output", "JSON lines file to write", required=True),
        argument("--max-bytes", "maximum number of bytes of text (default: %(default)s)", type=int,
                 default=DEFAULT_MAX_BYTES),
        path_flag("--folder", "folder with the modules (default: the standard library)", metavar="D"),
        argument("--seed", "seed of the order of the documents (default: %(default)s)", type=int, default=1234),
    )  # fmt: skip


@returns_exit_status(prefix="")
def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    options = build_parser().parse_args(argv)
    summary = write_stdlib_corpus(options.output, folder=options.folder, max_bytes=options.max_bytes, seed=options.seed)
    state = "written" if summary.changed else "unchanged"
    print(f"{summary.path} {state}: {summary.num_documents} modules, {summary.text_bytes / 1e6:.2f} MB of text")
    return 0
