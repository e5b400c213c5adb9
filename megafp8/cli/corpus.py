r"""Write a text corpus from this machine's Python standard library, without network: JSON lines, a document per module.

    python tools/build_stdlib_corpus.py --output corpus.jsonl

--folder takes the modules of another folder, such as the installed packages for more text:

    python tools/build_stdlib_corpus.py --output corpus.jsonl --max-bytes 80000000 \
      --folder "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megafp8.cli.common import build_command_parser, returns_exit_status
from megafp8.data.preprocessing.corpus import DEFAULT_MAX_BYTES, write_stdlib_corpus
from megafp8.utils.files import path_argument


def build_parser() -> argparse.ArgumentParser:
    parser = build_command_parser(__doc__)
    parser.add_argument("--output", required=True, type=path_argument, help="JSON lines file to write")
    parser.add_argument(
        "--max-bytes", type=int, default=DEFAULT_MAX_BYTES, help="maximum number of bytes of text (default %(default)s)"
    )
    parser.add_argument(
        "--folder", type=path_argument, metavar="D", help="folder with the modules; default: the standard library"
    )
    parser.add_argument(
        "--seed", type=int, default=1234, help="seed of the order of the documents (default %(default)s)"
    )
    return parser


@returns_exit_status(prefix="")
def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    options = build_parser().parse_args(argv)
    summary = write_stdlib_corpus(options.output, folder=options.folder, max_bytes=options.max_bytes, seed=options.seed)
    state = "written" if summary.changed else "unchanged"
    print(f"{summary.path} {state}: {summary.num_documents} modules, {summary.text_bytes / 1e6:.2f} MB of text")
    return 0
