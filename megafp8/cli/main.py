"""The `megafp8` command: `megafp8 SUBCOMMAND ...` runs the module of that name in this folder.

    megafp8 plan --gpus 8 --model-preset llama3-8b
    megafp8 SUBCOMMAND --help

Subcommands (megafp8 --version prints the version):
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Optional

from megafp8 import __version__

# Subcommand: the same program as a script of a checkout, and what it does.
SUBCOMMANDS = {
    "pretrain": ("pretrain_gpt.py", "train a GPT, on one device or under torchrun"),
    "generate": ("tools/generate_text.py", "continue a text with a trained model"),
    "checkpoint": ("tools/checkpoint.py", "list, verify, show, prune, hash and seal checkpoints"),
    "convert": ("tools/convert_checkpoint.py", "convert checkpoints to and from Hugging Face's format"),
    "corpus": ("tools/build_stdlib_corpus.py", "write a text corpus from Python's standard library"),
    "train-tokenizer": ("tools/train_tokenizer.py", "train a lossless tokenizer"),
    "preprocess": ("tools/preprocess_data.py", "turn text into token shards"),
    "merge-shards": ("tools/merge_shards.py", "join or divide token shards"),
    "inspect-shards": ("tools/inspect_shards.py", "summarize and verify token shards"),
    "build-index": ("tools/build_index.py", "check shards and build their sample indices"),
    "plan": ("tools/plan.py", "find the fastest layout of a model on a number of GPUs"),
    "plot-schedule": ("tools/plot_lr_schedule.py", "show the learning-rate schedule of a training command"),
    "plot-statistics": ("tools/plot_telemetry.py", "plot the quantization statistics of a run"),
    "inspect-quantization": ("tools/inspect_quantization.py", "measure the quantization error of each recipe"),
    "run-comparison": ("tools/run_comparison.py", "train one model in several recipes and compare them"),
    "report": ("tools/report.py", "report on finished runs or on a scaling study"),
    "compare": ("tools/compare_runs.py", "compare finished runs"),
    "study": ("launcher/scaling_study.py", "run a scaling study or a sweep from a YAML file"),
    "scaling-report": ("tools/scaling_report.py", "fit scaling laws to a study"),
    "torchrun": ("launcher/torchrun.py", "train on the GPUs of this machine, with a log for each rank"),
    "slurm": ("launcher/slurm.py", "submit training to Slurm"),
    "supervise": ("launcher/supervise.py", "restart a training command until its run is done"),
    "check-nodes": ("launcher/check_nodes.py", "check the nodes of a Slurm job before training"),
    "doctor": ("tools/doctor.py", "check whether training can run on this machine"),
}


def help_text() -> str:
    """Return the text of `megafp8 --help`; imports no subcommand."""
    width = max(map(len, SUBCOMMANDS))
    rows = (f"  {name:{width}}  {text}\n" for name, (_, text) in SUBCOMMANDS.items())
    return f"{__doc__}\n{''.join(rows)}"


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run a subcommand and return its exit status; 64 for a subcommand that does not exist."""
    if "_ARGCOMPLETE" in os.environ:
        from megafp8.cli.completion import complete

        complete()  # does not return
    words = sys.argv[1:] if argv is None else list(argv)
    name = words[0].replace("_", "-") if words else ""
    if name in SUBCOMMANDS:
        sys.argv = [f"megafp8 {name}", *words[1:]]  # argparse takes the name in usage lines from here
        return importlib.import_module(f"megafp8.cli.{name.replace('-', '_')}").main()
    if words in (["--help"], ["-h"]):
        print(help_text(), end="")
        return 0
    if words == ["--version"]:
        print(f"megafp8 {__version__}")
        return 0
    from difflib import get_close_matches

    from megafp8.errors import ConfigError

    if not words:
        problem = "which subcommand? See megafp8 --help"
    else:
        near = get_close_matches(name, SUBCOMMANDS)
        problem = f"{words[0]}: no such subcommand; " + (f"did you mean {' or '.join(near)}?" if near else "see --help")
    print(f"megafp8: {problem}", file=sys.stderr)
    return ConfigError.exit_status


if __name__ == "__main__":
    sys.exit(main())
