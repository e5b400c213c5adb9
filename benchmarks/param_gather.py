"""FP8 weights that are stored and gathered as codes, compared with BF16 weights: bytes, step time and memory.

    torchrun --nproc-per-node 2 benchmarks/param_gather.py [--rounds 10] [--json FILE]

The emulated layers on CPU ranks with the distributed optimizer, alternating in the same processes on the same samples.
Both sides of a recipe must have bitwise equal losses. Rank 0 reports. Bytes are those that a rank receives in a step,
counted at the collectives; weights are the bytes that it stores between steps, without quantized copies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import timing
from benchmarks.in_process import add_run, add_size_options, command_line, end_runs, start_run
from megafp8.checkpoint.progress import Progress
from megafp8.training.evaluation import build_batches
from megafp8.training.run import Run
from megafp8.training.step import StepResult, train_step

RECIPES = ("tensorwise", "delayed", "blockwise")
COMMON = "--bf16 --transformer-impl emulated --fp8-format e4m3 --use-distributed-optimizer"
SIDES = {"bf16": "", "fp8": "--fp8-param-gather"}


def stepper(run: Run, train_iters: int, results: list[StepResult]) -> Callable[[], None]:
    """A function that takes one step of a run and notes its result."""
    batches = build_batches(run, run.datasets[0], 0, train_iters * run.global_batch_size, num_workers=0)
    return lambda: results.append(train_step(run, batches, Progress(len(results))))


def weight_bytes(run: Run) -> int:
    """Memory of the weights on this rank."""
    return sum(buffer.param_data.nbytes for chunk in run.training_state.chunks for buffer in chunk.buffers)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every recipe on both sides, in turns."""
    train_iters = options.rounds + options.warmup
    runs: dict[str, Run] = {}
    for recipe in RECIPES:
        for side, flag in SIDES.items():
            text = command_line(options, train_iters, f"{COMMON} --fp8-recipe {recipe} {flag}")
            runs[f"{recipe} {side}"] = add_run(next(iter(runs.values())), text) if runs else start_run(text)
    results: dict[str, list[StepResult]] = {name: [] for name in runs}
    steps = {name: stepper(run, train_iters, results[name]) for name, run in runs.items()}
    times = timing.take_turns(steps, rounds=options.rounds, warmup=options.warmup)
    rank, weights = dist.get_rank(), {name: weight_bytes(run) for name, run in runs.items()}
    end_runs()
    for recipe in RECIPES:
        bf16, fp8 = ([result.loss for result in results[f"{recipe} {side}"]] for side in SIDES)
        assert fp8 == bf16, f"{recipe}: losses differ, {fp8} against {bf16}"
    gathered = {name: done[-1].metrics["param_gather_bytes"] for name, done in results.items()}
    return {"rank": rank, "times": times, "gathered_bytes": gathered, "weight_bytes": weights}


def report(measured: dict[str, Any]) -> dict[str, Any]:
    """Print the table and return what goes into the JSON."""
    times, gathered, weights = (measured[name] for name in ("times", "gathered_bytes", "weight_bytes"))
    header = ("recipe", "gathered, BF16", "FP8", "weights, BF16", "FP8", "step to BF16's, CPU [95%]")
    rows, ratios = [], {}
    for recipe in RECIPES:
        bf16, fp8 = (f"{recipe} {side}" for side in SIDES)
        ratios[recipe] = timing.ratios_to(bf16, {name: times[name] for name in (bf16, fp8)})[fp8]["cpu"]
        rows.append((recipe, gathered[bf16], gathered[fp8], weights[bf16], weights[fp8], ratios[recipe]))
    print(timing.format_table(header, rows))
    print(timing.describe_quiet(times))
    print("losses equal bit by bit")
    return {"ratios": ratios, "gathered_bytes": gathered, "weight_bytes": weights}


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_size_options(
        parser, num_layers=4, hidden_size=512, num_attention_heads=8, seq_length=256, vocab_size=4096,
        micro_batch_size=2, global_batch_size=4,
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each side")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each side before them")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(argv)
    measured = measure(options)
    if measured["rank"] != 0:
        return
    result = report(measured)
    if options.json:
        timing.write_json(options.json, {"options": vars(options), **result, "times": measured["times"]})


if __name__ == "__main__":
    main()
