"""Step times on several GPUs of one host: every recipe under every layout, with FP8 weights and without.

    python benchmarks/gpu_layouts.py --shape B --json FILE
    python benchmarks/gpu_layouts.py --layouts "TP 4" --modes bf16 delayed --extra="--use-transformer-engine-op-fuser"
    python benchmarks/gpu_layouts.py --shape M1 --layouts "EP 4" --modes bf16 @bf16 delayed @delayed
    python benchmarks/gpu_layouts.py --layouts "DP 2" --modes delayed "NCCL_MAX_CTAS=8 delayed" --profile
    python benchmarks/gpu_layouts.py --shape B32k --layouts "1 GPU" "CP 2" --document-tokens 2048 \\
        --modes delayed "delayed --reset-attention-mask --eod-mask-loss"

A mode is RECIPE FLAGS, with a recipe of `gpu_train.py`, or @RECIPE SETTINGS, behind what its ranks find in their
environment. With @ it is the peer: a bare megatron-core loop (`megatron_loop.py`) with the same layout, microbatches
and batch, and with its fastest settings but those named. Ranks are forked from a process that has imported everything
but not touched the GPU, so that no mode has the memory or the garbage of another; layouts that need fewer GPUs than
there are run side by side. A data-parallel rank trains the batch of its shape, a pipeline four microbatches a stage.

Timed are `--steps` steps of rank 0, each until it has read its loss, by their median; the mean has the time between two
synchronizations of all ranks. The peak is that of the rank with the highest. Gathered bytes are what a rank gets of
updated weights in a step. With `--rounds` everything is measured again, every second round in reverse order, and times
are medians. Speed is to the same software's BF16 and to the peer's same recipe, the fastest of its settings, under the
same layout and environment; scaling is sequences a second and GPU, to the same recipe and flags on one GPU. `--profile`
tells of two more steps where rank 0 spends them (`gpu_profile.py`).

The JSON has a line for each measurement, in the form that `planner_measurements.py` reads. `--shape tiny` runs on any
machine, on CPU ranks where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import gpu_profile, gpu_steps  # (first: it sets how torch looks for GPUs)
from benchmarks.gpu_layout_rows import LAYOUTS, OURS, PEER, Row, Task, W, fitting, mode_text, table
from benchmarks.gpu_train import MODES as MODES_OF_TRAINING
from benchmarks.gpu_train import SHAPES
from benchmarks.ports import free_ports

import megatron.core  # isort: skip
import numpy as np  # isort: skip
import torch  # isort: skip
import torch.distributed as dist  # isort: skip

from megafp8.analysis.profile_report import profile_text
from megafp8.config.schema.model import ParallelConfig
from megafp8.device.cuda_libraries import cuda_library_versions
from megafp8.device.platform import Platform, detect_platform, init_distributed, shutdown_distributed
from megafp8.training.checks import ValidatedRun

MODES = ("bf16", "tensorwise", "delayed", f"tensorwise {W}", f"delayed {W}")
JOIN_MINUTES = 2
DOCUMENT_SIGMA = 1.2  # of the logarithm of lengths: the mean is twice the median


class Trained(NamedTuple):
    """A step.

    Attributes:
        gathered: bytes of updated weights that the rank got, None where that is not counted.
        is_repeated: whether it was computed twice.
        document_squares: sum of the squared lengths of its documents, None where attention has no borders.
    """

    loss: float
    gathered: Optional[int] = None
    is_repeated: Optional[bool] = None
    document_squares: Optional[float] = None


Trainer = Callable[[int], Trained]
"""Trains step i."""
Work = Callable[[argparse.Namespace, Any], Any]
"""What a rank does for a task."""


# ---- in a rank ----------------------------------------------------------------------------------------------------


def be_rank(
    sender: Connection,
    work: Work,
    options: argparse.Namespace,
    task: Task,
    rank: int,
    first_gpu: int,
    address: tuple[str, int],
) -> None:
    """The life of a rank: rank 0 sends what its work returns, every rank the error that it meets."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(task.layout.num_gpus), "LOCAL_RANK": str(first_gpu + rank),
        "LOCAL_WORLD_SIZE": str(options.gpus), "MASTER_ADDR": address[0], "MASTER_PORT": str(address[1]),
    }  # fmt: skip
    os.environ |= task.environment
    # Before the mode is given up, its ranks say where they are.
    faulthandler.dump_traceback_later(0.95 * options.mode_s)
    os.environ.setdefault("UB_SKIPMC", "1")  # user buffers without NVLink multicast, which not every host allows
    try:
        row = work(options, task)
        sender.send(row if rank == 0 else None)
        shutdown_distributed()
    except Exception:  # noqa: BLE001 - the other modes are still of interest
        sender.send(f"rank {rank}: {traceback.format_exc()}")


def join(parallel: ParallelConfig) -> Platform:
    """Meet the other ranks, after the checks: tensor parallelism sets how CUDA starts kernels before its first use."""
    platform = detect_platform()
    init_distributed(platform, dataclasses.replace(parallel, distributed_timeout_minutes=JOIN_MINUTES))
    return platform


def measure(options: argparse.Namespace, task: Task) -> Row:
    """Build a mode on all ranks and train."""
    is_peer = task.software == PEER
    validated = gpu_steps.check_mode(options, mode_text(task, options.shape))
    # The peer has no memory registered with NCCL, and none of its settings.
    platform = join(ParallelConfig() if is_peer else validated.invocation.config.parallel)
    train = peer_trainer(options, task, validated, platform) if is_peer else our_trainer(options, validated)
    losses = [train(step).loss for step in range(1, options.warm_up + 1)]
    meet(platform)
    results, times = list[Trained](), [time.perf_counter()]
    for step in range(1, options.steps + 1):
        results.append(train(options.warm_up + step))
        times.append(time.perf_counter())  # the loss has been read
    meet(platform)
    mean_ms = (time.perf_counter() - times[0]) * 1e3 / options.steps
    times_ms = [1e3 * (after - before) for before, after in itertools.pairwise(times)]
    peak = peak_gib(platform)
    if options.profile:
        profile(train, task, options.warm_up + options.steps + 1)
    flags, environment = task.flags, " ".join(f"{name}={value}" for name, value in task.environment.items())
    gathered, repeated = results[-1].gathered, [each.is_repeated for each in results]
    data, batch = validated.invocation.config.data, validated.invocation.config.training.global_batch_size
    squares = [each.document_squares for each in results if each.document_squares is not None]
    attended = statistics.mean(squares) / (batch * data.seq_length**2) if squares and data.seq_length else None
    extra = f"{flags} {task.layout.flags} {options.extra}" if task.software == OURS else task.layout.flags
    return Row(
        shape=options.shape, recipe=task.recipe, extra=" ".join(extra.split()),
        label=" ".join(f"{task.name} {'FP8 weights' if flags == W else flags} {environment}".split()),
        num_gpus=task.layout.num_gpus,
        step_ms=statistics.median(times_ms), times_ms=[round(each, 1) for each in times_ms],
        peak_gib=peak, gathered_mb=None if gathered is None else gathered / 1e6,
        losses=losses + [each.loss for each in results], device=platform.name, layout=task.name, flags=flags,
        cuda_versions=cuda_library_versions(),
        environment=environment, software=task.software, mean_ms=mean_ms,
        num_repeated=None if None in repeated else sum(map(bool, repeated)), attended=attended,
        megatron=megatron.core.__version__,
    )  # fmt: skip


def our_trainer(options: argparse.Namespace, validated: ValidatedRun) -> Trainer:
    """megafp8."""
    if options.skewed:
        skew_routing()
    if options.document_tokens:
        draw_documents(options.document_tokens)
    train = gpu_steps.trainer(validated, options.warm_up + options.steps + gpu_profile.PROFILED_STEPS)

    def step(number: int) -> Trained:
        result = train(number)
        metrics = result.metrics
        return Trained(
            result.loss, metrics.get("param_gather_bytes"), metrics.get("is_repeated", False),
            metrics.get("document_squares"),
        )  # fmt: skip

    return step


def skew_routing() -> None:
    """Every fourth token has experts of the first half only."""
    from megafp8.models.router import Router

    plain = Router.gating

    def gating(self: Router, tokens: torch.Tensor) -> torch.Tensor:
        logits = plain(self, tokens)
        is_fourth = torch.arange(len(logits), device=logits.device)[:, None, None] % 4 == 0
        is_second_half = torch.arange(logits.shape[-1], device=logits.device) >= logits.shape[-1] // 2
        return torch.where(is_fourth & is_second_half, -1e4, logits)

    Router.gating = gating  # type: ignore[method-assign]


def draw_documents(mean_tokens: int) -> None:
    """Mock documents with log-normal lengths, as those of web pages, in place of uniform ones."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    plain = MockGPTLowLevelDataset.__init__

    def init(self: Any, tokenizer: Any) -> None:
        plain(self, tokenizer)
        logarithm = math.log(mean_tokens) - DOCUMENT_SIGMA**2 / 2  # of the median
        lengths = np.random.default_rng(self.seed).lognormal(logarithm, DOCUMENT_SIGMA, self.size)
        self.sequence_lengths = np.maximum(lengths, 2).astype(np.int32)

    MockGPTLowLevelDataset.__init__ = init


def peer_trainer(options: argparse.Namespace, task: Task, validated: ValidatedRun, platform: Platform) -> Trainer:
    """The peer, divided as megafp8 would be; the loss is that of rank 0's data."""
    from benchmarks.megatron_loop import Division, PeerLoop

    parallel, training = validated.invocation.config.parallel, validated.invocation.config.training
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    micro_batch, global_batch = training.micro_batch_size, training.global_batch_size
    assert micro_batch and global_batch
    num_microbatches = global_batch * tensor * pipeline // task.layout.num_gpus // micro_batch
    division = Division(tensor, pipeline, parallel.expert_model_parallel_size, micro_batch, num_microbatches)
    loop = PeerLoop(
        options.shape, task.recipe, turned_off=task.flags.split(), division=division, device=platform.device.type
    )
    return lambda number: Trained(loop.step(number))


def profile(train: Trainer, task: Task, first_step: int) -> None:
    """Two more steps of all ranks, and where rank 0 spent them. Every rank is profiled: none waits for one that is."""
    steps = itertools.count(first_step)
    found = gpu_profile.profiled(lambda: train(next(steps)))
    if dist.get_rank() == 0:
        print(f"\n{task}\n{profile_text(found, {})}", flush=True)


def peak_gib(platform: Platform) -> float:
    """Of the rank with the highest."""
    peak = torch.tensor([platform.peak_memory_bytes()], dtype=torch.float64, device=platform.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return peak.item() / 2**30


def meet(platform: Platform) -> None:
    """Wait for this device, and for the other ranks."""
    platform.synchronize()
    dist.barrier()


# ---- around the ranks ---------------------------------------------------------------------------------------------


class Running:
    """The ranks of a mode under a layout."""

    def __init__(self, options: argparse.Namespace, task: Any, first_gpu: int, work: Work = measure):
        self.task, self.gpus = task, range(first_gpu, first_gpu + task.layout.num_gpus)
        self.deadline = time.monotonic() + options.mode_s
        context, address = multiprocessing.get_context(options.method), ("127.0.0.1", free_ports(1)[0])
        self.processes: list[BaseProcess] = []
        self.pipes: dict[Connection, int] = {}
        for rank in range(len(self.gpus)):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=be_rank, args=(sender, work, options, task, rank, first_gpu, address))
            process.start()
            sender.close()
            self.processes.append(process)
            self.pipes[receiver] = rank

    def receive(self, pipe: Connection) -> Any:
        """What a rank says, once: a row, an error as text, or None where it has neither."""
        rank = self.pipes.pop(pipe)
        try:
            return pipe.recv()
        except EOFError:
            self.processes[rank].join()
            return f"rank {rank} ended with {self.processes[rank].exitcode}"

    def end(self) -> None:
        """Nobody outlives the mode."""
        for process in self.processes:
            if not self.pipes:
                process.join(10)
            process.kill()
            process.join()


def place(waiting: list[Task], running: list[Running], num_gpus: int) -> Optional[tuple[Task, int]]:
    """The first waiting task whose ranks the free GPUs hold side by side, and the first GPU; None if there is none."""
    taken = {gpu for run in running for gpu in run.gpus}
    for task in waiting:
        size = task.layout.num_gpus
        for first in range(0, num_gpus - size + 1, size):
            if taken.isdisjoint(range(first, first + size)):
                return task, first
    return None


def measure_all(options: argparse.Namespace) -> tuple[list[Row], dict[str, str]]:
    """Every mode under every layout, and what failed."""
    once = [Task(name, mode) for name in options.layouts for mode in options.modes]
    waiting = [task for number in range(options.rounds) for task in (once[::-1] if number % 2 else once)]
    running = list[Running]()
    rows, failures = list[Row](), dict[str, str]()
    try:
        while waiting or running:
            while (placed := place(waiting, running, options.gpus)) is not None:
                waiting.remove(placed[0])
                running.append(Running(options, *placed))
            by_pipe = {pipe: run for run in running for pipe in run.pipes}
            for pipe in wait(list(by_pipe), timeout=1.0):
                run, said = by_pipe[pipe], by_pipe[pipe].receive(pipe)
                if isinstance(said, str):
                    failures.setdefault(str(run.task), said)
                elif said is not None:
                    rows.append(said)
                    tell(said, options.json)
            for run in [run for run in running if is_over(run, failures)]:
                run.end()
                running.remove(run)
    finally:
        for run in running:
            run.end()
    return rows, failures


def is_over(run: Running, failures: dict[str, str]) -> bool:
    """Whether a mode has ended: all ranks have, or one failed and the others wait for it, or its time is up."""
    if run.pipes and str(run.task) not in failures and time.monotonic() > run.deadline:
        failures[str(run.task)] = "no end in --mode-s"
    return not run.pipes or str(run.task) in failures


def tell(row: Row, path: Optional[Path]) -> None:
    """A line for people, and one for the file."""
    loss = row.losses[-1]
    print(
        f"{row}: {row.step_ms:.1f} ms, mean {row.mean_ms:.1f}, {row.num_repeated or 0} twice, {row.peak_gib:.1f} GiB, "
        f"loss {loss:.4f}{'' if row.attended is None else f', documents of {row.attended:.1%} of a sequence'}",
        flush=True,
    )
    if path is not None:
        with path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(vars(row)) + "\n")


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="B", help="model; batches are the layouts'")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, help="default: all that the GPUs hold")
    modes_help = 'RECIPE, "NAME=VALUE RECIPE FLAGS", or of the peer "@RECIPE SETTINGS"'
    parser.add_argument("--modes", nargs="+", default=list(MODES), help=modes_help)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2, help="of this machine")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--rounds", type=int, default=1, help="times that everything is measured")
    parser.add_argument("--mode-s", type=float, default=120.0, help="seconds after which a mode is given up")
    parser.add_argument("--profile", action="store_true", help="also tell where the time of rank 0 goes")
    parser.add_argument("--extra", default="", help='more flags for megafp8: --extra="--flag value"')
    parser.add_argument("--skewed", action="store_true", help="a quarter of the tokens has experts of the first half")
    parser.add_argument("--document-tokens", type=int, help="mean length of documents, whose lengths are log-normal")
    parser.add_argument("--json", type=Path, help="write a line for each measurement to this file")
    parser.add_argument("--append", action="store_true", help="keep the lines that it has")
    options = parser.parse_args(argv)
    options.layouts = options.layouts or fitting(options.gpus, options.shape)
    for mode in options.modes:
        if not any("=" not in word for word in mode.split()):
            parser.error(f"--modes {mode!r} names no recipe: give {', '.join(MODES_OF_TRAINING)} behind NAME=VALUE")
    problem = peer_problem(options)
    if problem:
        parser.error(problem)
    if options.profile and not torch.cuda.is_available():
        parser.error("--profile times kernels of a GPU, and this machine has none: leave it out")
    return options


def peer_problem(options: argparse.Namespace) -> Optional[str]:
    """What the peer cannot do, and the fix."""
    tasks = [Task(name, mode) for name in options.layouts for mode in options.modes]
    if options.document_tokens and any(task.software == PEER for task in tasks):
        return "--document-tokens is for megafp8's modes: the peer's sequences have no documents"
    for task in (task for task in tasks if task.software == PEER):
        from benchmarks import megatron_loop

        if task.recipe not in megatron_loop.RECIPES:
            return f"--modes {task.mode!r}: the peer has no such recipe: use {', '.join(megatron_loop.RECIPES)}"
        if options.shape not in megatron_loop.SHAPES:
            return f"--shape {options.shape}: the peer does not have it: use {', '.join(megatron_loop.SHAPES)}"
        if "overlapped" in task.name:
            return f"--layouts {task.name!r}: the peer has no user buffers: measure {task.mode} under other layouts"
    return None


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit status 1 if a mode failed."""
    options = parse(argv)
    with contextlib.suppress(ImportError):  # without Transformer Engine
        gpu_steps.import_everything()
    options.method = gpu_steps.start_method() if torch.cuda.is_available() else "fork"
    if options.json and not options.append:
        options.json.unlink(missing_ok=True)
    rows, failures = measure_all(options)
    device = rows[0].device if rows else "nothing measured"
    print(f"shape {options.shape}, {options.steps} steps after {options.warm_up}, {device}")
    print(table(rows))
    for name, text in failures.items():
        print(f"{name} failed:\n{text}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
