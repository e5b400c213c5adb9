"""Gradients that are reduced in FP8, compared with FP32 and BF16: bytes of a step, and step time on a slow link.

    python benchmarks/fp8_gradients.py [--rates none 10gbit 1gbit] [--rounds 8] [--json FILE]

Two data-parallel ranks on one machine, one thread each, with megatron-core's layers and emulated links. The sides
alternate in the same processes. For a rate the ranks run in two network namespaces that a pair of virtual interfaces
connects, with `tc` limiting both directions: this needs root, `ip` and `tc`. The rate `none` is the loopback interface.

Bytes are those that a rank receives in a step. `reduce-scatter` is the distributed optimizer, which also gathers the
updated weights in BF16 in every step; `all-reduce` is DDP without it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import timing
from benchmarks.in_process import add_run, add_size_options, command_line, end_runs, start_run
from benchmarks.param_gather import stepper
from megafp8.training.run import Run
from megafp8.training.step import StepResult

SIDES = {
    "FP32": "",
    "BF16": "--grad-reduce-in-bf16",
    "FP8 block": "--grad-reduce-in-fp8",
    "FP8 block, all parameters": "--grad-reduce-in-fp8 --grad-reduce-fp8-exclude none",
    "FP8 tensor": "--grad-reduce-in-fp8 --grad-reduce-fp8-scaling tensor",
}
LAYOUTS = {"reduce-scatter": "--use-distributed-optimizer", "all-reduce": ""}
NO_LIMIT = "none"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29_577


def measure(options: argparse.Namespace) -> None:
    """One rank: every side alternately. Rank 0 writes times and bytes to the file."""
    train_iters, runs = options.rounds + options.warmup, dict[str, Run]()
    for side, flags in SIDES.items():
        extra = f"--bf16 --transformer-impl local {LAYOUTS[options.layout]} {flags}"
        text = command_line(options, train_iters, extra)
        runs[side] = add_run(next(iter(runs.values())), text) if runs else start_run(text)
    results: dict[str, list[StepResult]] = {side: [] for side in runs}
    steps = {side: stepper(run, train_iters, results[side]) for side, run in runs.items()}
    times = timing.take_turns(steps, rounds=options.rounds, warmup=options.warmup)
    rank, last = dist.get_rank(), {side: done[-1] for side, done in results.items()}
    received: list[Any] = [None] * dist.get_world_size()
    own = {
        side: (result.metrics["grad_reduce_bytes"], result.metrics.get("param_gather_bytes", 0))
        for side, result in last.items()
    }
    dist.all_gather_object(received, own)
    end_runs()
    if rank == 0:
        losses = {side: [result.loss for result in done] for side, done in results.items()}
        timing.write_json(options.worker, {"times": times, "received_bytes": received, "losses": losses})


@contextlib.contextmanager
def throttled_namespaces(rate: str) -> Iterator[list[list[str]]]:
    """Two network namespaces with a link of a rate; yields the command prefix of each rank."""
    names, links = ([f"{kind}{os.getpid()}x{rank}" for rank in range(2)] for kind in ("mf8n", "v"))
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            run("ip", "link", "set", link, "netns", name)
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            # The bucket holds 1 ms of the fastest rate; packets wait up to 50 ms for it.
            limit = ("rate", rate, "burst", "1mb", "latency", "50ms")
            run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *limit)
        yield [
            ["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={link}", f"MASTER_ADDR={ADDRESSES[0]}"]
            for name, link in zip(names, links, strict=True)
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


@contextlib.contextmanager
def loopback() -> Iterator[list[list[str]]]:
    """The command prefixes of ranks that share the machine's network."""
    yield [["env", "GLOO_SOCKET_IFNAME=lo", "MASTER_ADDR=127.0.0.1"]] * 2


def run(*words: str) -> None:
    """Run a command.

    Raises:
        CalledProcessError: it failed.
    """
    subprocess.run(words, check=True)


def measure_in_ranks(rate: str, layout: str, words: Sequence[str]) -> dict[str, Any]:
    """Times, bytes and losses of a rate and a layout."""
    with (
        tempfile.TemporaryDirectory() as folder,
        loopback() if rate == NO_LIMIT else throttled_namespaces(rate) as prefixes,
    ):
        result = Path(folder) / "result.json"
        ranks = [
            subprocess.Popen(
                [
                    *prefix, f"RANK={rank}", f"LOCAL_RANK={rank}", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2",
                    f"MASTER_PORT={PORT}", "OMP_NUM_THREADS=1", sys.executable, __file__, *words,
                    "--worker", str(result), "--layout", layout,
                ]
            )
            for rank, prefix in enumerate(prefixes)
        ]  # fmt: skip
        try:
            statuses = [rank.wait() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(statuses):
            raise RuntimeError(f"the ranks ended with {statuses}")
        return json.loads(result.read_text(encoding="utf-8"))


def rows_of(measured: dict[str, Any]) -> list[list[Any]]:
    """A row for each side: bytes of gradients over both ranks and relative, weights, step time and relative."""
    times = {side: timing.Times(**each) for side, each in measured["times"].items()}
    ratios = timing.ratios_to("FP32", times)
    received = {
        side: [sum(rank[side][kind] for rank in measured["received_bytes"]) for kind in (0, 1)] for side in SIDES
    }
    return [
        [
            side, received[side][0] / 2e6, received[side][0] / received["FP32"][0],
            received[side][0] / received["BF16"][0], received[side][1] / 2e6, times[side].median_wall_ms,
            ratios[side]["wall"],
        ]
        for side in SIDES
    ]  # fmt: skip


HEADER = ("reduction", "gradients, MB", "to FP32", "to BF16", "weights, MB", "step, ms", "to FP32's [95%]")


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_size_options(
        parser, num_layers=4, hidden_size=512, num_attention_heads=8, seq_length=32, vocab_size=2048,
        micro_batch_size=1, global_batch_size=2,
    )  # fmt: skip
    parser.add_argument("--rates", nargs="+", default=[NO_LIMIT], help="of the link: none, or as tc takes it: 1gbit")
    parser.add_argument("--rounds", type=int, default=8, help="timed steps of each side")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each side before them")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--layout", choices=tuple(LAYOUTS), help=argparse.SUPPRESS)
    words = sys.argv[1:] if argv is None else list(argv)
    options = parser.parse_args(words)
    if options.worker is not None:
        measure(options)
        return
    found = {}
    for rate in options.rates:
        for layout in LAYOUTS:
            found[f"{rate}, {layout}"] = measured = measure_in_ranks(rate, layout, words)
            print(f"\nlink {rate}, {layout}")
            print(timing.format_table(HEADER, rows_of(measured)), flush=True)
    if options.json:
        timing.write_json(options.json, {"options": vars(options), "measured": found})


if __name__ == "__main__":
    main()
