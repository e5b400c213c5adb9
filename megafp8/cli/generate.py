"""Continue a text with a trained model.

    megafp8 generate --load RUN --prompt "def main("

The text is printed to standard output as it is generated, messages to standard error. Tokens are generated with a
key-value cache, in high precision. --no-cache generates with the arithmetic of training, FP8 and FP4 included.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megafp8.cli import common
from megafp8.cli.command_flags import add_flags, argument, float_flag, int_flag, path_flag, switch
from megafp8.errors import ConfigError, DataError
from megafp8.utils.files import atomic_write_text
from megafp8.utils.object_store import place_argument

if TYPE_CHECKING:
    from megafp8.training.generation import Sample

log = common.stderr_log()
show = partial(print, end="", flush=True)  # for parts of the text


def build_parser() -> argparse.ArgumentParser:
    parser = add_flags(
        common.build_command_parser(__doc__),
        argument("--load", "folder of the run (its --save)", type=place_argument, required=True, metavar="RUN"),
        int_flag("--ckpt-step", "checkpoint to load (default: the newest)"),
    )  # fmt: skip
    add_flags(
        parser.add_mutually_exclusive_group(),
        argument("--prompt", "text to continue (default: a new document)", default="", metavar="TEXT"),
        path_flag("--prompt-file", "file with the text to continue, used unchanged", metavar="F"),
    )  # fmt: skip
    add_flags(
        parser,
        int_flag("--num-samples", "number of continuations (default: 1)", default=1),
        int_flag("--max-new-tokens", "maximum number of tokens of a continuation (default: 200)", default=200),
    )  # fmt: skip
    add_flags(
        parser.add_mutually_exclusive_group(),
        float_flag("--temperature", "divisor of the logits; lower is less random (default: 0.8)", default=0.8),
        switch("--greedy", "always the most probable token"),
    )  # fmt: skip
    add_flags(
        parser,
        int_flag("--top-k", "sample from the K most probable tokens (default: 0, all)", default=0, metavar="K"),
        float_flag("--top-p", "sample from the fewest tokens with a total probability of P (default: 1, all)",
                   default=1.0, metavar="P"),
        argument("--seed", "random seed of the first sample; each later one adds 1 (default: %(default)s)", type=int,
                 default=1234),
        path_flag("--output", "also write the text to F; for *.jsonl one JSON object per line", metavar="F"),
        switch("--no-cache", "each token takes a forward pass over the text so far, with the arithmetic of training"),
        argument("--precision", "checkpoint: the arithmetic of training, which FP8 and FP4 have only with --no-cache; "
                 "high: the same without quantization; default: checkpoint with --no-cache, else high, with FP32 in "
                 "place of BF16 for quantized runs on devices that emulate BF16", choices=("checkpoint", "high")),
    )  # fmt: skip
    common.add_tokenizer_file_flags(parser, "for a checkpoint that was converted without a tokenizer")
    return parser


def problems(arguments: argparse.Namespace) -> list[str]:
    """Return everything that is wrong with the flags."""
    found = common.too_small(arguments, ("num_samples", "max_new_tokens"))
    if arguments.greedy and (arguments.top_k or arguments.top_p != 1):
        found.append("--greedy leaves nothing to choose from: leave out --top-k and --top-p, or --greedy")
    return found + common.output_problems(arguments.output) + common.launcher_problems("generates")


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
    uses_cache = not arguments.no_cache
    model = load_language_model(arguments.load, arguments.ckpt_step, arguments.precision, uses_cache, tokenizer)
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
    if path.suffix == ".jsonl":
        lines = [json.dumps(dataclasses.asdict(sample), ensure_ascii=False) for sample in samples]
    else:
        lines = [heading(index, len(samples)) + sample.prompt + sample.text for index, sample in enumerate(samples)]
    atomic_write_text(path, "".join(f"{line}\n" for line in lines))
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
