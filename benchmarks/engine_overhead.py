"""Overhead of megafp8 per training step, compared with a bare megatron-core loop that does the same work.

    python benchmarks/engine_overhead.py [--rounds 40] [--profile] [--control] [--json FILE]

Both sides train the same model (same layers, weights, optimizer, schedule) on the same samples, alternating in one
process on one CPU rank with one thread, each with its own model. The bare loop follows megatron-core's examples:
batches from a plain DataLoader, zeroed gradients, the forward-backward schedule, the loss summed over ranks, optimizer
and learning rate. megafp8's side is a step of `pretrain_gpt.py`: its loader, the check for non-finite values, timers,
the record, and all sinks (JSONL, console, TensorBoard). The losses must be bitwise equal, which shows that the work is
the same. The model that is built first is about 0.5% faster than later ones, so everything is built several times, in
alternating order. `--control` adds a second bare loop, whose ratio shows the resolution of the method. Bar: a median
ratio of 1.03.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import timing
from benchmarks.in_process import add_run, add_size_options, command_line, end_runs, start_run
from megafp8.checkpoint.progress import Progress
from megafp8.metrics.records import RECORDS_FILE, StepRecord
from megafp8.metrics.sinks import Sinks, build_sinks, read_records
from megafp8.training.extension import LoopState
from megafp8.training.extensions import build_extensions
from megafp8.training.loop import make_step
from megafp8.training.run import Run
from megafp8.training.run_record import run_record

BAR = 1.03
DTYPES = {"fp32": "--transformer-impl local", "bf16": "--bf16 --transformer-impl local"}
OURS, BARE, CONTROL = "megafp8", "bare", "second bare"
PROFILE_LINES = 25
Calls = list[tuple[str, float, float]]


def token_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum over the tokens, their number, and both for the log."""
    total, num_tokens = (losses.float() * loss_mask).sum(), loss_mask.sum()
    return total, num_tokens.int(), {"loss": torch.stack((total.detach(), num_tokens))}


def forward_step(batches: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """One microbatch, as megatron-core's schedules want it."""
    batch = next(batches)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(token_loss, batch["loss_mask"])


class BareLoop:
    """megatron-core's own steps with nothing around them. Takes model, optimizer and schedule of a run."""

    def __init__(self, run: Run):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.training_state = run.training_state
        self.forward_backward = get_forward_backward_func()
        self.batches = iter(DataLoader(run.datasets[0], batch_size=run.config.training.micro_batch_size))
        self.sizes = {
            "num_microbatches": run.num_microbatches,
            "seq_length": run.config.data.seq_length,
            "micro_batch_size": run.config.training.micro_batch_size,
        }
        self.global_batch_size = run.global_batch_size
        self.losses: list[float] = []

    def step(self) -> None:
        """Train on one global batch."""
        chunks, optimizer = self.training_state.chunks, self.training_state.optimizer
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = self.forward_backward(
            forward_step_func=forward_step, data_iterator=self.batches, model=chunks, forward_only=False, **self.sizes
        )
        totals = torch.stack([report["loss"] for report in reports]).sum(0)
        dist.all_reduce(totals)
        total, num_tokens = totals.tolist()
        self.losses.append(total / num_tokens)
        is_updated, _, _ = optimizer.step()
        if is_updated:
            self.training_state.schedule.step(increment=self.global_batch_size)


class EngineLoop:
    """megafp8's steps, as `training.loop` takes them, with all extensions."""

    def __init__(self, run: Run, sinks: Sinks, train_iters: int):
        self.state = LoopState(run, sinks, Progress(), started=time.monotonic())
        self.extensions = build_extensions()
        for extension in self.extensions:
            extension.open(self.state)

    def step(self) -> None:
        """Train on one global batch and write its record."""
        make_step(self.state, self.extensions)


def build_runs(names: Sequence[str], options: argparse.Namespace, train_iters: int) -> dict[str, Run]:
    """A run for each loop, built in this order. The bare loops' have no check for bad numbers."""
    runs: dict[str, Run] = {}
    for name in names:
        unchecked = "" if name == OURS else "--no-check-for-nan-in-loss-and-grad"
        text = command_line(options, train_iters, f"{DTYPES[options.dtype]} {unchecked}")
        runs[name] = add_run(next(iter(runs.values())), text) if runs else start_run(text)
    return runs


def measure_build(options: argparse.Namespace, number: int, folder: Path) -> tuple[dict[str, timing.Times], Calls]:
    """All loops built anew and run in turns: times, and with `--profile` where megafp8's go in the first build.

    Args:
        folder: empty, for megafp8's records.
    """
    rounds, is_profiled = options.rounds // options.builds, options.profile and number == 0
    train_iters = rounds + options.warmup + (options.profile_steps if is_profiled else 0)
    names = [OURS, BARE, CONTROL] if options.control else [OURS, BARE]
    runs = build_runs(names if number % 2 == 0 else names[::-1], options, train_iters)
    bare = {name: BareLoop(runs[name]) for name in names[1:]}
    logging = runs[OURS].config.logging
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sinks = build_sinks(logging, run_folder=str(folder), total_steps=train_iters, stream=nowhere)
        with sinks:
            sinks.write(run_record(runs[OURS], None))
            ours = EngineLoop(runs[OURS], sinks, train_iters)
            steps = {OURS: ours.step, **{name: loop.step for name, loop in bare.items()}}
            times = timing.take_turns(steps, rounds=rounds, warmup=options.warmup)
            calls = timing.profile_calls(ours.step, options.profile_steps, "megafp8") if is_profiled else []
    end_runs()
    losses = [record.loss for record in read_records(folder / RECORDS_FILE) if isinstance(record, StepRecord)]
    for name, loop in bare.items():
        assert losses[: len(loop.losses)] == loop.losses, f"the {name} loop did other work: its losses differ"
    return times, calls


def measure(options: argparse.Namespace) -> tuple[dict[str, timing.Times], Calls]:
    """All builds together."""
    times: dict[str, timing.Times] = {}
    calls: Calls = []
    for number in range(options.builds):
        with tempfile.TemporaryDirectory() as folder:
            of_build, calls_of_build = measure_build(options, number, Path(folder))
        gc.collect()
        calls = calls or calls_of_build
        for name, side in of_build.items():
            times.setdefault(name, timing.Times()).extend(side)
    return times, calls


def report(times: dict[str, timing.Times], calls: Calls) -> dict[str, Any]:
    """Print the tables and return what goes into the JSON."""
    ratios = timing.ratios_to(BARE, times)
    header = ("loop", "wall ms", "CPU ms", "ratio, wall [95%]", "ratio, CPU [95%]")
    rows = [(name, side.median_wall_ms, side.median_cpu_ms, *ratios[name].values()) for name, side in times.items()]
    print(timing.format_table(header, rows))
    print(timing.describe_quiet(times))
    median = ratios[OURS][timing.clock_to_trust(times)].median
    print(f"{'within' if median <= BAR else 'OVER'} the bar of {BAR}; losses equal bit by bit")
    if calls:
        print("\nmegafp8's functions in one step, profiled, with all that they call:")
        print(timing.format_table(("function", "calls", "ms"), calls[:PROFILE_LINES]))
    return {"ratios": ratios, "median": median, "bar": BAR, "lost_fraction": timing.lost_fraction(times)}


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_size_options(
        parser, num_layers=4, hidden_size=256, num_attention_heads=4, seq_length=256, vocab_size=4096,
        micro_batch_size=2, global_batch_size=8,
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="the faster one shows more of the overhead")
    parser.add_argument("--rounds", type=int, default=60, help="timed steps of each loop, over all builds")
    parser.add_argument("--builds", type=int, default=4, help="times that the models are built, in changing order")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each loop in each build that do not count")
    parser.add_argument("--control", action="store_true", help="a second bare loop, to see what the method can tell")
    parser.add_argument("--profile", action="store_true", help="also list where megafp8's functions spend their time")
    parser.add_argument("--profile-steps", type=int, default=10, help="steps under the profiler")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(argv)

    tokens = options.global_batch_size * options.seq_length
    microbatches = options.global_batch_size // options.micro_batch_size
    print(
        f"one training step, hidden {options.hidden_size}, {options.num_layers} layers, {tokens} tokens in "
        f"{microbatches} microbatches, {options.dtype}, 1 thread"
    )
    times, calls = measure(options)
    result = report(times, calls)
    if options.json:
        timing.write_json(options.json, {"options": vars(options), **result, "calls": calls, "times": times})


if __name__ == "__main__":
    main()
