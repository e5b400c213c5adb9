"""Continue a text with a trained model.

    python tools/generate_text.py --load RUN --prompt "def main("

The text is printed to standard output as it is generated, messages to standard error. Tokens are generated with a
key-value cache, in high precision. --no-cache generates with the arithmetic of training, FP8 and FP4 included.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megafp8.cli import common
from megafp8.errors import ConfigError, DataError
from megafp8.utils.files import path_argument

if TYPE_CHECKING:
    from megafp8.training.generation import Sample

log = common.stderr_log()
show = partial(print, end="", flush=True)  # for parts of the text


def build_parser() -> argparse.ArgumentParser:
    parser = common.build_command_parser(__doc__)
    parser.add_argument(
        "--load", type=path_argument, required=True, metavar="RUN", help="folder of the run (its --save)"
    )
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="checkpoint to load; default the newest")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="", metavar="TEXT", help="text to continue; default a new document")
    prompt.add_argument(
        "--prompt-file", type=path_argument, metavar="F", help="file with the text to continue, used unchanged"
    )
    parser.add_argument("--num-samples", type=int, default=1, metavar="N", help="number of continuations (default 1)")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=200,
        metavar="N",
        help="maximum number of tokens of a continuation (default 200)",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--temperature", type=float, default=0.8, help="divisor of the logits; lower is less random (default 0.8)"
    )
    choice.add_argument("--greedy", action="store_true", help="always the most probable token")
    parser.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K most probable tokens (default 0: all)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the fewest tokens with a total probability of P (default 1: all)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1234,
        help="random seed of the first sample; each later one adds 1 (default %(default)s)",
    )
    parser.add_argument(
        "--output", type=path_argument, metavar="F",
        help="also write the text to F; for *.jsonl one JSON object per line",
    )  # fmt: skip
    parser.add_argument(
        "--no-cache", action="store_true",
        help="each token takes a forward pass over the text so far, with the arithmetic of training",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=("checkpoint", "high"),
        help="checkpoint: the arithmetic of training, which FP8 and FP4 have only with --no-cache; high: the same "
        "without quantization; default: checkpoint with --no-cache, else high, with FP32 in place of BF16 for "
        "quantized runs on devices that emulate BF16",
    )  # fmt: skip
    group = parser.add_argument_group("tokenizer", "type and current paths of its files; default as in training")
    group.add_argument(
        "--tokenizer-type", metavar="TYPE", help="for a checkpoint that was converted without a tokenizer"
    )
    common.add_tokenizer_file_flags(group)
    return parser


def problems(arguments: argparse.Namespace) -> list[str]:
    """Return everything that is wrong with the flags."""
    found = []
    for flag, number in (("--num-samples", arguments.num_samples), ("--max-new-tokens", arguments.max_new_tokens)):
        if number < 1:
            found.append(f"{flag} {number}: must be 1 or more")
    if arguments.greedy and (arguments.top_k or arguments.top_p != 1):
        found.append("--greedy leaves nothing to choose from: leave out --top-k and --top-p, or --greedy")
    if arguments.output is not None and not os.access(arguments.output.absolute().parent, os.W_OK):
        found.append(f"--output {arguments.output}: its folder is not there or cannot be written")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        found.append(f"{os.environ['WORLD_SIZE']} ranks: one process generates; start it without a launcher")
    return found


def read_prompt(arguments: argparse.Namespace) -> str:
    """Return the text to continue."""
    if arguments.prompt_file is None:
        return arguments.prompt
    try:
        return arguments.prompt_file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompt-file {arguments.prompt_file} cannot be read as UTF-8 text: {error}") from error


def run(arguments: argparse.Namespace) -> None:
    """Check, load, generate, write."""
    from megafp8.training.sampling import GREEDY, Sampling

    sampling = GREEDY if arguments.greedy else Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    found = problems(arguments) + sampling.problems()
    if found:
        raise ConfigError(found)
    prompt = read_prompt(arguments)
    common.install_patches()
    from megafp8.training.generation import generate_text
    from megafp8.training.language_model import load_language_model

    tokenizer = common.given_flags(arguments, ("tokenizer_type", *common.TOKENIZER_FILES))
    model = load_language_model(
        arguments.load, arguments.ckpt_step, arguments.precision, not arguments.no_cache, tokenizer
    )
    log(str(model))
    if model.warning:
        log(model.warning)
    samples = []
    for index in range(arguments.num_samples):
        show(heading(index, arguments.num_samples) + prompt)
        started = time.monotonic()
        sample = generate_text(model, prompt, sampling, arguments.max_new_tokens, arguments.seed + index, show)
        show("\n")
        if sample.num_prompt_tokens > model.context_tokens:
            log(f"the prompt has {sample.num_prompt_tokens} tokens; the model saw the last {model.context_tokens}")
        log(f"{speed(sample.num_tokens, time.monotonic() - started)}, ended by {sample.ended_by}")
        samples.append(sample)
    if arguments.output is not None:
        write_samples(arguments.output, samples)


def speed(num_tokens: int, seconds: float) -> str:
    """Return the time of the new tokens, the prompt's pass included, in words."""
    return f"{num_tokens} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s"


def heading(index: int, count: int) -> str:
    """Return the line above one of several samples."""
    return f"=== sample {index + 1} of {count} ===\n" if count > 1 else ""


def write_samples(path: Path, samples: list[Sample]) -> None:
    """Write the file of --output atomically."""
    from megafp8.utils.files import atomic_write

    if path.suffix == ".jsonl":
        lines = [json.dumps(dataclasses.asdict(sample), ensure_ascii=False) for sample in samples]
    else:
        lines = [heading(index, len(samples)) + sample.prompt + sample.text for index, sample in enumerate(samples)]
    with atomic_write(path) as stream:
        stream.write("".join(f"{line}\n" for line in lines).encode("utf-8"))
    log(f"wrote {path}")


@common.returns_exit_status("generate")
def main(argv: Sequence[str]) -> int:
    """Run and return the exit status. torch is imported only once the flags are read."""
    arguments = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that lack a character
    try:
        run(arguments)
        return 0
    except KeyboardInterrupt:
        print(flush=True)
        return common.INTERRUPTED
