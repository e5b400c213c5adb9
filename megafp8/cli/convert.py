"""Convert checkpoints to and from Hugging Face's format (Llama, Qwen, Gemma and others) and Megatron-LM's.

    megafp8 convert to-hf runs/first models/first
    megafp8 convert to-hf runs/first models/first-fp8 --ckpt-step 200 --fp8 --fp8-recipe tensorwise
    megafp8 convert from-hf Llama-3.2-1B models/llama --dtype bf16
    megafp8 pretrain --config models/llama/config.json --pretrained-checkpoint models/llama ...
    megafp8 convert from-megatron megatron/run runs/imported
    megafp8 convert to-megatron runs/first megatron/first

to-hf writes weights (in files of at most --max-shard-size), config.json, generation_config.json and the tokenizer's
files; a model that came from such a folder keeps its family and special tokens. from-hf writes a checkpoint that every
layout can load, its tokenizer, and a config.json with the settings of the model, which are also printed as flags. A
conversion and its inverse give the same bits; values that are rounded or left out are reported. Memory holds few
tensors at a time, to-hf one file; the peak is printed. A model that the target format does not support is refused with
all reasons; --drop-mtp-layers leaves out multi-token prediction. --dry-run reports them without writing. --check-logits
compares the result with transformers before it gets its name. No file can run code when it is read.

from-megatron and to-megatron convert dense models in --ckpt-format torch_dist with optimizer state, schedule, number
of samples and random state, bit for bit. from-megatron writes the arguments that it understood to config.json, and
names the others.

Exit status: 0; 64 for wrong flags; 66 for a missing or damaged tokenizer; 74 for a file that is damaged, missing or
refused.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megafp8.cli import common
from megafp8.cli.command_flags import add_flags, argument, int_flag, switch
from megafp8.errors import ConfigError
from megafp8.recipes import registry
from megafp8.utils.files import path_argument
from megafp8.utils.object_store import place_argument

if TYPE_CHECKING:
    from megafp8.checkpoint.convert.from_megatron import MegatronImport
    from megafp8.checkpoint.convert.tensor_mapping import TensorMapping
    from megafp8.checkpoint.convert.to_megatron import MegatronExport

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def build_parser() -> argparse.ArgumentParser:
    parser = common.build_command_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    to_hf = commands.add_parser("to-hf", help="convert a checkpoint to a folder that transformers reads")
    add_flags(
        to_hf,
        argument("source", "folder of a run (its --save) or of one checkpoint", type=place_argument, metavar="RUN"),
        argument("output", "folder to create", type=place_argument, metavar="OUT"),
        int_flag("--ckpt-step", "checkpoint to convert (default: the newest)"),
        switch("--fp8", "write the weights of linear layers as FP8 codes and scales"),
        argument("--fp8-recipe", "recipe of --fp8: blocks of 128 x 128 as in DeepSeek-V3, or one scale per tensor or "
                 "channel as in compressed-tensors (default: the run's)", choices=registry.with_export_form()),
        argument("--max-shard-size", "maximum file size, such as 500MB or 5GB (default: 5GB)", type=num_bytes,
                 default=num_bytes("5GB"), metavar="SIZE"),
        argument("--model-type", "family to write, a model_type of config.json such as qwen3 (default: the first "
                 "that has the model's features)", metavar="TYPE"),
        switch("--ignore-overrides", "convert although the run had --override transformer.FIELD=..."),
        switch("--drop-mtp-layers", "leave out the layers of multi-token prediction, which are not converted"),
    )  # fmt: skip
    common.add_tokenizer_file_flags(to_hf)
    from_hf = commands.add_parser("from-hf", help="convert such a folder to a checkpoint to train from")
    add_flags(
        from_hf,
        argument("source", "with config.json and safetensors", type=path_argument, metavar="FOLDER"),
        argument("output", "run folder to create, with a checkpoint of step 0", type=place_argument, metavar="OUT"),
        int_flag("--make-vocab-size-divisible-by", "pad the vocabulary to a multiple (default: 128)"),
        switch("--drop-mtp-layers", "leave out the layers of multi-token prediction of a DeepSeek-V3; default: refuse "
               "them"),
    )  # fmt: skip
    for command in (to_hf, from_hf):
        add_flags(
            command,
            argument("--dtype", "dtype of the converted weights (default: as stored)", choices=("bf16", "fp32")),
            switch("--check-logits", "compare FP32 logits with transformers, which needs the library and memory for "
                   "both models"),
        )  # fmt: skip
    megatron = add_megatron_commands(commands)
    for command in (to_hf, from_hf, *megatron):
        command.add_argument("--dry-run", action="store_true", help="print the mapping of tensors and stop")
    return parser


def add_megatron_commands(commands: Any) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Add the conversions to and from Megatron-LM."""
    to_megatron = commands.add_parser("to-megatron", help="convert a checkpoint to one that Megatron-LM loads")
    to_megatron.add_argument(
        "source", type=place_argument, metavar="RUN", help="folder of a run (its --save) or of one checkpoint"
    )
    from_megatron = commands.add_parser("from-megatron", help="convert a checkpoint of Megatron-LM to train from")
    from_megatron.add_argument(
        "source", type=path_argument, metavar="FOLDER", help="folder of a run of Megatron-LM or of one checkpoint"
    )
    for command in (to_megatron, from_megatron):
        add_flags(
            command,
            argument("output", "run folder to create", type=place_argument, metavar="OUT"),
            int_flag("--ckpt-step", "checkpoint to convert (default: the newest)"),
            switch("--no-load-optim", "convert without optimizer state and schedule"),
        )  # fmt: skip
    return to_megatron, from_megatron


def num_bytes(text: str) -> int:
    """Parse a size such as 500MB."""
    match = re.fullmatch(r"([0-9]+)(|KB|MB|GB)", text.upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 500MB or 5GB")
    return int(match[1]) * UNITS[match[2]]


def problems(options: argparse.Namespace) -> list[str]:
    """Return everything that is wrong with the flags."""
    found = []
    if options.command == "to-hf" and options.fp8_recipe and not options.fp8:
        found.append(f"--fp8-recipe {options.fp8_recipe} has no effect without --fp8")
    multiple = options.make_vocab_size_divisible_by if options.command == "from-hf" else None
    if multiple is not None and multiple < 1:
        found.append(f"--make-vocab-size-divisible-by {multiple} must be at least 1")
    checks_logits = options.command in ("to-hf", "from-hf") and options.check_logits
    if checks_logits and options.dry_run:
        found.append("--check-logits has no effect with --dry-run: remove one")
    if checks_logits and options.command == "to-hf" and options.fp8:
        found.append("--check-logits with --fp8: quantized weights give other logits; remove one")
    if not options.dry_run and options.output.exists():
        found.append(f"{options.output} exists; give a folder that does not")
    return found


def print_table(table: Sequence[TensorMapping]) -> None:
    """Print the tensors of both sides, mapped to each other."""
    for row in table:
        theirs = ", ".join(f"{name} {list(shape)}" for name, shape in row.hf_shapes().items())
        print(f"{row.name} {list(row.shape)}  =  {theirs}  ({type(row.layout).__name__})")


def to_hf(options: argparse.Namespace) -> None:
    from megafp8.checkpoint.convert.safetensors_files import publish_folder
    from megafp8.checkpoint.convert.to_huggingface import ExportOptions, plan_export

    export = plan_export(
        options.source,
        ExportOptions(
            step=options.ckpt_step,
            dtype=options.dtype,
            quantizes=options.fp8,
            fp8_recipe=options.fp8_recipe,
            tokenizer_files=common.given_flags(options, common.TOKENIZER_FILES),
            model_type=options.model_type,
            ignores_overrides=options.ignore_overrides,
            drops_mtp=options.drop_mtp_layers,
        ),
    )
    if options.dry_run:
        print_table(export.table)
    else:
        with publish_folder(options.output) as folder, common.bytes_bar(export.num_bytes) as bar:
            export.write(folder, options.max_shard_size, bar.update)
            memory = peak_memory()
            checked = checked_logits(options, export.path, folder, export.fields["vocab_size"])
        size = f"{export.num_bytes / 1e9:.3f} GB, {memory}"
        print(f"{export.path} is now {options.output}: {export.fields['model_type']}, {size}{checked}")
    print_notes(export.notes)


def from_hf(options: argparse.Namespace) -> None:
    from megafp8.checkpoint.convert.from_huggingface import plan_import
    from megafp8.checkpoint.convert.safetensors_files import publish_folder
    from megafp8.config.flags import to_argv

    plan = plan_import(options.source, options.dtype, options.make_vocab_size_divisible_by, options.drop_mtp_layers)
    described = plan.model_config
    if options.dry_run:
        print_table(plan.table)
    else:
        with publish_folder(options.output) as folder, common.bytes_bar(plan.num_bytes) as bar:
            described = plan.write(folder, options.output, bar.update)
            memory = peak_memory()
            (checkpoint,) = folder.glob("iter_*")
            checked = checked_logits(options, checkpoint, options.source, plan.origin.num_tokens)
        size = f"{plan.num_bytes / 1e9:.3f} GB, {memory}"
        print(f"{options.source} ({plan.origin.model_type}) is now {options.output}: {size}{checked}")
        print(f"to train from it: --config {options.output / 'config.json'} --pretrained-checkpoint {options.output}")
    print(f"the model as flags: {shlex.join(to_argv(described))}")
    print_notes(plan.notes)


def to_megatron(options: argparse.Namespace) -> None:
    from megafp8.checkpoint.convert.to_megatron import plan_megatron_export

    plan = plan_megatron_export(options.source, options.ckpt_step, not options.no_load_optim)
    write_plan(plan, options)
    print(f"to train from it with Megatron-LM: --ckpt-format torch_dist --load {options.output}")
    print_notes(plan.notes)


def from_megatron(options: argparse.Namespace) -> None:
    from megafp8.checkpoint.convert.from_megatron import plan_megatron_import

    plan = plan_megatron_import(options.source, options.ckpt_step, not options.no_load_optim)
    write_plan(plan, options)
    print(f"to train from it: --config {options.output / 'config.json'} --load {options.output}")
    print_notes(plan.notes)


def write_plan(plan: MegatronImport | MegatronExport, options: argparse.Namespace) -> None:
    """Write what is planned, or with --dry-run print its tensors."""
    from megafp8.checkpoint.convert.safetensors_files import publish_folder

    if options.dry_run:
        for name, source in plan.sources.items():
            print(f"{name} {list(source.shape)} {str(source.dtype).removeprefix('torch.')}")
        return
    with publish_folder(options.output) as folder, common.bytes_bar(plan.num_bytes) as bar:
        plan.write(folder, bar.update)
    print(f"{options.source} is now {options.output}: {plan.num_bytes / 1e9:.3f} GB")


def print_notes(notes: Sequence[str]) -> None:
    """Print the notes of a conversion."""
    for note in notes:
        print(f"note: {note}")


def checked_logits(options: argparse.Namespace, checkpoint: Path, hf_folder: Path, num_tokens: int) -> str:
    """Compare logits if that was requested, and return the result as text."""
    if not options.check_logits:
        return ""
    from megafp8.training.logits_check import check_logits

    difference = check_logits(checkpoint, hf_folder, num_tokens)
    return f"; logits of transformers differ by {difference:.1g} of the largest"


def peak_memory() -> str:
    """Return the peak of this process's memory so far as text."""
    from megafp8.device.platform import peak_resident_bytes

    return f"peak memory {peak_resident_bytes() / 1e9:.2f} GB"


COMMANDS = {"to-hf": to_hf, "from-hf": from_hf, "to-megatron": to_megatron, "from-megatron": from_megatron}


@common.returns_exit_status("convert")
def main(argv: Sequence[str]) -> int:
    """Run and return the exit status. torch is imported only once the flags are read."""
    options = build_parser().parse_args(argv)
    if found := problems(options):
        raise ConfigError(found)
    common.install_patches()
    COMMANDS[options.command](options)
    return 0
