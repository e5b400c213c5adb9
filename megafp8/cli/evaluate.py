"""Measure the loss and the perplexity of checkpoints on a data set, or how well they answer questions.

    megafp8 evaluate --load RUN
    megafp8 evaluate --load RUN OTHER --data-path shards/test --output losses.json
    megafp8 evaluate --load RUN --input held_out.jsonl --precision high
    megafp8 evaluate --load RUN --tasks questions.jsonl

Without --data-path, --input and --tasks the data are the samples of the run's own validations. Otherwise the data set
is read in its own order, and every token but the first is predicted once, in windows of the run's sequence length. The
loss is the mean over all tokens. One process computes it on a GPU if there is one, else on the CPU.

A line of a task file is a question, {"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}, or a continuation,
{"context": "2 + 2 =", "target": " 4"}. Accuracy is the share of questions whose right choice is the most likely one,
normalized accuracy that for each byte of the choice. Bits per byte are those of the right answers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from megafp8.cli import common
from megafp8.cli.command_flags import add_flags, argument, int_flag, path_flag, switch
from megafp8.errors import ConfigError
from megafp8.recipes import registry
from megafp8.utils.files import atomic_write_text
from megafp8.utils.formatting import text_table
from megafp8.utils.object_store import place_argument

if TYPE_CHECKING:
    from megafp8.training.language_model import LanguageModel

log = common.stderr_log()
PRECISIONS = ("checkpoint", "high", "bf16", "fp32", *registry.names())


def build_parser() -> argparse.ArgumentParser:
    parser = add_flags(
        common.build_command_parser(__doc__),
        argument("--load", "folders of runs (their --save)", type=place_argument, required=True, nargs="+",
                 metavar="RUN"),
        int_flag("--ckpt-step", "checkpoints to load of each run (default: the newest)", nargs="+"),
    )  # fmt: skip
    add_flags(
        parser.add_mutually_exclusive_group(),
        argument("--data-path", "path prefixes of token shards", nargs="+", metavar="PREFIX"),
        argument("--input", "text files, folders or patterns, as for preprocessing; an end-of-document token follows "
                 "each document", nargs="+", metavar="F"),
        argument("--tasks", "task files, of questions as JSON lines", nargs="+", metavar="F"),
    )  # fmt: skip
    add_flags(
        parser,
        argument("--json-key", "key of the text in JSON (default: text)", default="text", metavar="KEY"),
        int_flag("--tokens", "number of tokens to predict, of the run's validation samples complete sequences "
                 "(default: all)"),
        int_flag("--seq-length", "tokens per window, at most the run's (default: the run's)", metavar="S"),
        int_flag("--micro-batch-size", "sequences per forward pass (default: the run's); scales of complete tensors "
                 "depend on it, and so do the last digits of the loss"),
        argument("--precision", "checkpoint: the arithmetic of training; high: the same without quantization; bf16, "
                 f"fp32, or a recipe: {', '.join(registry.names())} (default: checkpoint)", choices=PRECISIONS,
                 default="checkpoint", metavar="P"),
        path_flag("--output", "also write the results to F as JSON", metavar="F"),
        switch("--json", "print JSON instead of the table"),
    )  # fmt: skip
    common.add_tokenizer_file_flags(parser, "for a checkpoint that was converted without one")
    return parser


def problems(arguments: argparse.Namespace) -> list[str]:
    """Return everything that is wrong with the flags."""
    found = common.too_small(arguments, ("tokens", "seq_length", "micro_batch_size"))
    if arguments.tasks:
        given = common.given_flags(arguments, ("tokens", "seq_length"))
        found += [f"--{name.replace('_', '-')} has no effect with --tasks: remove it" for name in given]
    elif arguments.seq_length is not None and not (arguments.data_path or arguments.input):
        found.append("--seq-length: the run's validation samples have the run's length; give --data-path or --input")
    return found + common.output_problems(arguments.output) + common.launcher_problems("evaluates")


def window_length(arguments: argparse.Namespace, model: LanguageModel) -> int:
    """Return the tokens per window.

    Raises:
        ConfigError: more than the run's, or no multiple of what its GEMMs need.
    """
    length: int = arguments.seq_length or model.context_tokens
    if length > model.context_tokens or length % model.length_multiple:
        raise ConfigError(
            f"--seq-length {length}: must be a multiple of {model.length_multiple} of at most {model.context_tokens}, "
            f"the sequence length of {model.path}"
        )
    return length


def open_data(arguments: argparse.Namespace, model: LanguageModel, size: int) -> tuple[Optional[int], Iterator[Any]]:
    """Return the number of tokens to predict, if it is known, and the batches."""
    from megafp8.data import token_windows
    from megafp8.data.preprocessing.documents import read_texts
    from megafp8.data.preprocessing.sources import find_sources
    from megafp8.data.shards import read_index
    from megafp8.training.dataset_loss import validation_batches

    if not (arguments.data_path or arguments.input):
        num_sequences, batches = validation_batches(model, size, arguments.tokens)
        return num_sequences * model.context_tokens, batches
    total = arguments.tokens
    if arguments.data_path:
        available = sum(read_index(prefix).num_tokens for prefix in arguments.data_path) - 1
        total = available if total is None else min(total, available)
        documents = token_windows.shard_documents(arguments.data_path)
    else:
        texts = read_texts(find_sources(arguments.input, on_message=log), arguments.json_key)
        documents = token_windows.text_documents(texts, model.tokenizer)
    length = window_length(arguments, model)
    samples = token_windows.windows(documents, length, arguments.tokens)
    return total, token_windows.microbatches(samples, size, length, model.tokenizer.vocab_size)


def evaluate(arguments: argparse.Namespace, folder: Path, step: Optional[int]) -> dict[str, Any]:
    """Load one checkpoint and return its result, as plain values."""
    from tqdm import tqdm

    from megafp8.checkpoint.metadata import read_config
    from megafp8.data.task_files import load_tasks, truncations
    from megafp8.mcore.process_groups import destroy_process_groups
    from megafp8.training.dataset_loss import dataset_loss
    from megafp8.training.language_model import load_language_model
    from megafp8.training.task_scores import checkpoint_scores

    tokenizer = common.given_flags(arguments, ("tokenizer_type", *common.TOKENIZER_FILES))
    model = load_language_model(folder, step, arguments.precision, uses_cache=False, tokenizer_files=tokenizer)
    log(str(model))
    try:
        size = arguments.micro_batch_size or read_config(model.path).training.micro_batch_size or 1
        if arguments.tasks:
            tasks = load_tasks(arguments.tasks, model.tokenizer, model.context_tokens)
            for warning in truncations(tasks):
                log(warning)
            with tqdm(total=sum(len(task.rows) for task in tasks), unit=" choices", disable=None) as bar:
                result: dict[str, Any] = checkpoint_scores(model, tasks, size, bar.update)
        else:
            total, batches = open_data(arguments, model, size)
            with tqdm(total=total, unit=" tokens", unit_scale=True, disable=None) as bar:
                result = dataclasses.asdict(dataset_loss(model, batches, bar.update))
    finally:
        destroy_process_groups()  # the next checkpoint may be of another model
    return {
        "checkpoint": str(model.path),
        "data": arguments.data_path or arguments.input or arguments.tasks or "validation samples of the run",
        "precision": arguments.precision,
        "layers": model.implementation.name,
        "device": str(model.device),
        "seq_length": arguments.seq_length or model.context_tokens,
        "micro_batch_size": size,
        **result,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a row for each checkpoint, or for each task of each."""
    if "tasks" in results[0]:
        columns = ("checkpoint", "task", "questions", "accuracy", "normalized", "bits/byte", "questions/s")
        return text_table(columns, [row for each in results for row in task_rows(each)], "llrrrrr")
    rows = [
        (each["checkpoint"], f"{each['loss']:.6f}", f"{each['perplexity']:,.4f}", f"{each['num_tokens']:,}",
         f"{each['num_tokens'] / max(each['seconds'], 1e-9):,.0f}")
        for each in results
    ]  # fmt: skip
    return text_table(("checkpoint", "loss", "perplexity", "tokens", "tokens/s"), rows, "lrrrr")


def task_rows(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Return a row for each task of a checkpoint."""
    tasks = result["tasks"]
    speed = sum(scores["num_questions"] for scores in tasks.values()) / max(result["seconds"], 1e-9)
    for name, scores in tasks.items():
        shares = ["-" if scores[key] is None else f"{scores[key]:.2%}" for key in ("accuracy", "normalized_accuracy")]
        numbers = f"{scores['num_questions']:,}", *shares, f"{scores['bits_per_byte']:.4f}", f"{speed:,.0f}"
        yield (result["checkpoint"], name, *numbers)


@common.returns_exit_status("evaluate")
def main(argv: Sequence[str]) -> int:
    """Run and return the exit status. torch is imported only once the flags are read."""
    arguments = build_parser().parse_args(argv)
    if found := problems(arguments):
        raise ConfigError(found)
    common.install_patches()
    results = [
        evaluate(arguments, folder, step) for folder in arguments.load for step in arguments.ckpt_step or (None,)
    ]
    text = json.dumps(results, indent=2)
    print(text if arguments.json else table(results))
    if arguments.output is not None:
        atomic_write_text(arguments.output, f"{text}\n")
        log(f"wrote {arguments.output}")
    return 0
