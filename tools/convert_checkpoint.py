#!/usr/bin/env python3
"""Checkpoints to and from the folders of Hugging Face's transformers: Llama and GPT-2, in safetensors.

    python tools/convert_checkpoint.py to-hf runs/first models/first
    python tools/convert_checkpoint.py to-hf runs/first models/first-fp8 --ckpt-step 200 --fp8 --fp8-recipe tensorwise
    python tools/convert_checkpoint.py from-hf Llama-3.2-1B models/llama --dtype bf16
    python pretrain_gpt.py --config models/llama/config.json --pretrained-checkpoint models/llama ...

to-hf writes weights (in files of --max-shard-size at most), config.json, generation_config.json and the tokenizer's
files. from-hf writes a checkpoint that any layout loads, its tokenizer, and a config.json with the settings that
describe the model; they are printed as flags, too. Elements are only moved, so both ways together change no bit; what
is rounded or left out is said. One tensor is in memory at a time, or one file's tensors. A model that the other side
does not have is refused with every reason, and --dry-run tells without writing. Nothing is read with pickle.

Exit status: 0; 64 for wrong flags; 66 for a missing tokenizer; 74 when something is damaged, missing or refused.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

from megafp8.errors import ConfigError, Megafp8Error
from megafp8.recipes import registry
from megafp8.utils.files import path_argument, path_text

if TYPE_CHECKING:
    from megafp8.checkpoint.convert.tensor_mapping import TensorMapping

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    to_hf = commands.add_parser("to-hf", help="a checkpoint as a folder that transformers reads")
    to_hf.add_argument(
        "source", type=path_argument, metavar="RUN", help="folder that the run had as --save, or a checkpoint's"
    )
    to_hf.add_argument("output", type=path_argument, metavar="OUT", help="folder to make")
    to_hf.add_argument("--ckpt-step", type=int, metavar="N", help="checkpoint to convert; default the newest")
    to_hf.add_argument("--fp8", action="store_true", help="the linears' weights as FP8 codes and scales (Llama)")
    to_hf.add_argument(
        "--fp8-recipe", choices=registry.with_export_form(),
        help="of --fp8: blocks of 128 x 128 as DeepSeek-V3, one scale a tensor or a channel as compressed-tensors; "
        "default the run's",
    )  # fmt: skip
    to_hf.add_argument(
        "--max-shard-size", type=num_bytes, default=num_bytes("5GB"), metavar="SIZE",
        help="largest file, as 500MB or 5GB (default 5GB); so much memory is taken",
    )  # fmt: skip
    to_hf.add_argument(
        "--ignore-overrides", action="store_true", help="convert although the run had --override transformer.FIELD=..."
    )
    group = to_hf.add_argument_group("tokenizer", "where its files are now; default where they were in training")
    for name in TOKENIZER_FILES:
        group.add_argument("--" + name.replace("_", "-"), type=path_text, metavar="F")
    from_hf = commands.add_parser("from-hf", help="such a folder as a checkpoint to train from")
    from_hf.add_argument("source", type=path_argument, metavar="FOLDER", help="with config.json and safetensors")
    from_hf.add_argument(
        "output", type=path_argument, metavar="OUT", help="run's folder to make, with a checkpoint of step 0"
    )
    from_hf.add_argument(
        "--make-vocab-size-divisible-by", type=int, metavar="N", help="pad the vocabulary to a multiple (default 128)"
    )
    for command in (to_hf, from_hf):
        command.add_argument("--dtype", choices=("bf16", "fp32"), help="of the weights there; default as stored")
        command.add_argument("--dry-run", action="store_true", help="only tell what would become what")
    return parser


def num_bytes(text: str) -> int:
    """A size such as 500MB."""
    match = re.fullmatch(r"(\d+)(|KB|MB|GB)", text.strip().upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 500MB or 5GB")
    return int(match[1]) * UNITS[match[2]]


def problems(options: argparse.Namespace) -> list[str]:
    """What is wrong with the flags, all at once."""
    found = []
    if options.command == "to-hf" and options.fp8_recipe and not options.fp8:
        found.append(f"--fp8-recipe {options.fp8_recipe} has no effect without --fp8")
    if options.command == "from-hf" and (options.make_vocab_size_divisible_by or 1) < 1:
        found.append(f"--make-vocab-size-divisible-by {options.make_vocab_size_divisible_by} must be at least 1")
    if not options.dry_run and options.output.exists():
        found.append(f"{options.output} exists; give a folder that does not")
    return found


def tell_table(table: Sequence[TensorMapping]) -> None:
    """Print which tensor is which."""
    for row in table:
        theirs = ", ".join(f"{name} {list(shape)}" for name, shape in row.their_shapes().items())
        print(f"{row.ours} {list(row.shape)}  =  {theirs}  ({type(row.layout).__name__})")


def say(notes: Sequence[str]) -> None:
    """Tell the person what is not the same on both sides."""
    for note in notes:
        print(f"note: {note}")


def with_progress(total_bytes: int, action: Callable[[Callable[[int], Any]], Any]) -> Any:
    """Do something under a progress bar, which is shown on a terminal only."""
    from tqdm import tqdm

    with tqdm(total=total_bytes, unit="B", unit_scale=True, disable=None) as bar:
        return action(bar.update)


# --- commands ---------------------------------------------------------------------------------------------------------


def to_hf(options: argparse.Namespace) -> None:
    from megafp8.checkpoint.convert.safetensors_files import new_folder
    from megafp8.checkpoint.convert.to_huggingface import ExportOptions, plan_export

    export = plan_export(
        options.source,
        ExportOptions(
            step=options.ckpt_step,
            dtype=options.dtype,
            quantizes=options.fp8,
            fp8_recipe=options.fp8_recipe,
            tokenizer_files={name: value for name in TOKENIZER_FILES if (value := getattr(options, name)) is not None},
            ignores_overrides=options.ignore_overrides,
        ),
    )
    if options.dry_run:
        tell_table(export.table)
    else:
        with new_folder(options.output) as folder:
            with_progress(export.num_bytes, lambda told: export.write(folder, options.max_shard_size, told))
        print(f"{export.path} is now {options.output}: {export.fields['model_type']}, {export.num_bytes / 1e9:.3f} GB")
    say(export.notes)


def from_hf(options: argparse.Namespace) -> None:
    from megafp8.checkpoint.convert.from_huggingface import plan_import
    from megafp8.checkpoint.convert.safetensors_files import new_folder
    from megafp8.config.flags import to_argv

    plan = plan_import(options.source, options.dtype, options.make_vocab_size_divisible_by)
    described = plan.described
    if options.dry_run:
        tell_table(plan.table)
    else:
        with new_folder(options.output) as folder:
            described = with_progress(plan.num_bytes, lambda told: plan.write(folder, options.output, told))
        print(f"{options.source} is now {options.output}: {plan.num_bytes / 1e9:.3f} GB")
        print(f"to train from it: --config {options.output / 'config.json'} --pretrained-checkpoint {options.output}")
    print(f"the model as flags: {shlex.join(to_argv(described))}")
    say(plan.notes)


COMMANDS = {"to-hf": to_hf, "from-hf": from_hf}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run and return the exit status. torch is imported only once the flags are read."""
    options = build_parser().parse_args(arguments)
    try:
        if found := problems(options):
            raise ConfigError(found)
        from megafp8.mcore import cpu_patches

        cpu_patches.install()
        COMMANDS[options.command](options)
        return 0
    except Megafp8Error as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
