r"""Write a text corpus from this machine's Python standard library, without network: JSON lines, a document per module.

    megafp8 corpus --output corpus.jsonl

--questions also writes a task file for megafp8 evaluate --tasks: which of four texts ends the docstring of a function?
The functions are those of the last tenth of the modules, which --split 90,10,0 does not train on.

--folder takes the modules of another folder, such as the installed packages for more text:

    megafp8 corpus --output corpus.jsonl --max-bytes 80000000 \
      --folder "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megafp8.cli.command_flags import add_flags, argument, int_flag, path_flag
from megafp8.cli.common import build_command_parser, returns_exit_status
from megafp8.data.preprocessing.cloze import cloze_questions, held_out, write_questions
from megafp8.data.preprocessing.corpus import DEFAULT_MAX_BYTES, stdlib_documents, stdlib_folder, write_stdlib_corpus
from megafp8.errors import ConfigError


def build_parser() -> argparse.ArgumentParser:
    return add_flags(
        build_command_parser(__doc__),
        path_flag("--output", "JSON lines file to write", required=True),
        argument("--max-bytes", "maximum number of bytes of text (default: %(default)s)", type=int,
                 default=DEFAULT_MAX_BYTES),
        path_flag("--folder", "folder with the modules (default: the standard library)", metavar="D"),
        argument("--seed", "seed of the order of the documents (default: %(default)s)", type=int, default=1234),
        path_flag("--questions", "task file to write with questions about held-out modules", metavar="F"),
        int_flag("--num-questions", "number of questions (default: %(default)s)", default=100),
    )  # fmt: skip


@returns_exit_status(prefix="")
def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    options = build_parser().parse_args(argv)
    if options.num_questions < 1:
        raise ConfigError(f"--num-questions {options.num_questions}: must be 1 or more")
    summary = write_stdlib_corpus(options.output, folder=options.folder, max_bytes=options.max_bytes, seed=options.seed)
    state = "written" if summary.changed else "unchanged"
    print(f"{summary.path} {state}: {summary.num_documents} modules, {summary.text_bytes / 1e6:.2f} MB of text")
    if options.questions is not None:
        folder = options.folder or stdlib_folder()
        documents = held_out([*stdlib_documents(folder, max_bytes=options.max_bytes, seed=options.seed)])
        write_questions(options.questions, cloze_questions(documents, options.num_questions, options.seed))
        print(f"{options.questions} written: {options.num_questions} questions; --split 90,10,0 does not train on them")
    return 0
