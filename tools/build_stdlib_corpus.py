r"""Write a text corpus from the Python standard library of this machine: JSON lines, one module a document, no network.

    python tools/build_stdlib_corpus.py --output corpus.jsonl

With --folder another folder's modules, such as those of the installed packages where more text is wanted:

    python tools/build_stdlib_corpus.py --output corpus.jsonl --max-bytes 80000000 \
      --folder "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout, installed or not

from megafp8.data.preprocessing.corpus import DEFAULT_MAX_BYTES, write_stdlib_corpus
from megafp8.errors import Megafp8Error
from megafp8.utils.files import path_argument


def main(argv: Optional[list[str]] = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=path_argument, help="JSON lines file to write")
    parser.add_argument(
        "--max-bytes", type=int, default=DEFAULT_MAX_BYTES, help="most bytes of text (default %(default)s)"
    )
    parser.add_argument("--folder", type=path_argument, metavar="D", help="take the modules below D instead")
    parser.add_argument("--seed", type=int, default=1234, help="seed of the order of the documents")
    options = parser.parse_args(argv)
    try:
        summary = write_stdlib_corpus(
            options.output, folder=options.folder, max_bytes=options.max_bytes, seed=options.seed
        )
    except Megafp8Error as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except OSError as error:
        print(f"--output {options.output} cannot be written: {error}", file=sys.stderr)
        return 74
    state = "written" if summary.changed else "unchanged"
    print(f"{summary.path} {state}: {summary.num_documents} modules, {summary.text_bytes / 1e6:.2f} MB of text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
