"""Step times on several GPUs of one host: every recipe under every layout, with FP8 weights and without.

    python benchmarks/gpu_layouts.py --shape B --json FILE
    python benchmarks/gpu_layouts.py --layouts "TP 4" --modes bf16 delayed --extra="--use-transformer-engine-op-fuser"
    python benchmarks/gpu_layouts.py --layouts "DP 2" --modes delayed "NCCL_MAX_CTAS=8 delayed" --profile

A mode is RECIPE FLAGS, with a recipe of `gpu_train.py`, behind what its ranks find in their environment. They are
forked from a process that has imported everything but not touched the GPU, so that no mode has the memory or the
garbage of another; layouts that need fewer GPUs than there are run side by side. Timed are `--steps` steps together,
from one synchronization of all ranks to the other; the peak is that of the rank with the highest. Gathered bytes are
what a rank gets of updated weights in a step. With `--rounds` everything is measured again, every second round in
reverse order, and times are medians. Speed is to BF16 under the same layout and environment; scaling is sequences a
second and GPU, to the same recipe and flags on one GPU. `--profile` tells of two more steps where rank 0 spends them
(`gpu_profile.py`).

The JSON has a line for each measurement, in the form that `planner_measurements.py` reads. `--shape tiny` runs on any
machine, on CPU ranks where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import gpu_profile, gpu_steps, timing  # (first: it sets how torch looks for GPUs)
from benchmarks.gpu_train import MODES as MODES_OF_TRAINING
from benchmarks.gpu_train import SHAPES
from benchmarks.planner_measurements import TP2, TP4
from benchmarks.ports import free_ports

import torch  # isort: skip
import torch.distributed as dist  # isort: skip

from megafp8.config.schema.model import ParallelConfig
from megafp8.device.platform import Platform, detect_platform, init_distributed, shutdown_distributed
from megafp8.training.checks import Checked
from megafp8.training.step import StepResult

W = "--fp8-param-gather"
MODES = ("bf16", "tensorwise", "delayed", f"tensorwise {W}", f"delayed {W}")
JOIN_MINUTES = 2


@dataclass(frozen=True)
class Layout:
    """Ranks and the flags that divide the work among them.

    Attributes:
        global_batch: sequences of a step, of all ranks.
    """

    num_gpus: int
    flags: str
    global_batch: int


# Batches: the shape's own (2 sequences) for each data-parallel rank; pipelines have four microbatches a stage.
LAYOUTS = {
    "1 GPU": Layout(1, "", 2),
    "DP 2": Layout(2, "", 4),
    "TP 2": Layout(2, TP2, 2),
    "PP 2": Layout(2, "--pipeline-model-parallel-size 2 --micro-batch-size 1", 8),
    "DP 4": Layout(4, "", 8),
    "TP 2, DP 2": Layout(4, TP2, 4),
    "TP 4": Layout(4, TP4, 2),
    "PP 4": Layout(4, "--pipeline-model-parallel-size 4 --micro-batch-size 1", 16),
    "TP 2 overlapped": Layout(2, f"{TP2} --tp-comm-overlap", 2),
    "TP 4 overlapped": Layout(4, f"{TP4} --tp-comm-overlap", 2),
}


@dataclass(frozen=True)
class Task:
    """A mode under a layout: what one set of ranks does."""

    name: str
    mode: str

    @property
    def layout(self) -> Layout:
        """By its name."""
        return LAYOUTS[self.name]

    @property
    def environment(self) -> dict[str, str]:
        """NAME=VALUE words before the recipe."""
        words = itertools.takewhile(lambda word: "=" in word, self.mode.split())
        return dict(word.split("=", 1) for word in words)

    @property
    def recipe(self) -> str:
        """A key of `gpu_train.MODES`."""
        return self._words[0]

    @property
    def flags(self) -> str:
        """Those behind the recipe."""
        return " ".join(self._words[1:])

    @property
    def _words(self) -> list[str]:
        """Those behind the environment."""
        return list(itertools.dropwhile(lambda word: "=" in word, self.mode.split()))

    def __str__(self) -> str:
        return f"{self.name} {self.mode}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement; the names are those of `planner_measurements.py`.

    Attributes:
        extra: all flags beyond the shape's and the recipe's.
        gathered_mb: what a rank gets of updated weights in a step, 1e6 bytes; None where nothing is gathered.
        losses: of all its steps.
        layout: its name; whatever follows from that is in LAYOUTS.
        flags: the mode's, without its recipe.
        environment: the mode's, as it was given.
    """

    shape: str
    recipe: str
    extra: str
    label: str
    num_gpus: int
    step_ms: float
    peak_gib: float
    gathered_mb: Optional[float]
    losses: list[float]
    device: str
    layout: str
    flags: str
    environment: str = ""


# ---- in a rank ----------------------------------------------------------------------------------------------------


def be_rank(
    sender: Connection, options: argparse.Namespace, task: Task, rank: int, first_gpu: int, address: tuple[str, int]
) -> None:
    """The life of a rank: rank 0 sends a row, every rank the error that it meets."""
    layout = task.layout
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(layout.num_gpus), "LOCAL_RANK": str(first_gpu + rank),
        "LOCAL_WORLD_SIZE": str(options.gpus), "MASTER_ADDR": address[0], "MASTER_PORT": str(address[1]),
    }  # fmt: skip
    os.environ |= task.environment
    os.environ.setdefault("UB_SKIPMC", "1")  # user buffers without NVLink multicast, which not every host allows
    try:
        # Checked before CUDA is used: tensor parallelism sets how it starts kernels.
        checked = gpu_steps.check_mode(options, mode_text(task))
        platform = detect_platform()
        init_distributed(platform, ParallelConfig(distributed_timeout_minutes=JOIN_MINUTES))
        row = measure(options, task, checked, platform)
        sender.send(row if rank == 0 else None)
        shutdown_distributed()
    except Exception:  # noqa: BLE001 - the other modes are still of interest
        sender.send(f"rank {rank}: {traceback.format_exc()}")


def mode_text(task: Task) -> str:
    """RECIPE FLAGS, with those of the layout."""
    return f"{task.recipe} {task.flags} {task.layout.flags} --global-batch-size {task.layout.global_batch}"


def measure(options: argparse.Namespace, task: Task, checked: Checked, platform: Platform) -> Row:
    """Build a mode on all ranks and train."""
    train = gpu_steps.trainer(checked)
    results = [train(step) for step in range(1, options.warm_up + 1)]
    meet(platform)
    started = time.perf_counter()
    results += [train(options.warm_up + step) for step in range(1, options.steps + 1)]
    meet(platform)
    step_ms = (time.perf_counter() - started) * 1e3 / options.steps
    peak = torch.tensor([platform.peak_memory_bytes()], dtype=torch.float64, device=platform.device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if options.profile:
        profile(train, task, options.warm_up + options.steps + 1)
    flags, environment = task.flags, " ".join(f"{name}={value}" for name, value in task.environment.items())
    gathered = results[-1].param_gather_bytes
    return Row(
        shape=options.shape, recipe=task.recipe, extra=" ".join(f"{flags} {task.layout.flags} {options.extra}".split()),
        label=" ".join(f"{task.name} {'FP8 weights' if flags == W else flags} {environment}".split()),
        num_gpus=task.layout.num_gpus,
        step_ms=step_ms, peak_gib=peak.item() / 2**30, gathered_mb=None if gathered is None else gathered / 1e6,
        losses=[result.loss for result in results], device=platform.name, layout=task.name, flags=flags,
        environment=environment,
    )  # fmt: skip


def profile(train: Callable[[int], StepResult], task: Task, first_step: int) -> None:
    """Two more steps of all ranks, and where rank 0 spent them. Every rank is profiled: none waits for one that is."""
    steps = itertools.count(first_step)
    found = gpu_profile.profiled(lambda: train(next(steps)))
    if dist.get_rank() == 0:
        print(f"\n{task}\n{found.table()}", flush=True)


def meet(platform: Platform) -> None:
    """Wait for this device, and for the other ranks."""
    platform.synchronize()
    dist.barrier()


# ---- around the ranks ---------------------------------------------------------------------------------------------


class Running:
    """The ranks of a mode under a layout."""

    def __init__(self, options: argparse.Namespace, task: Task, first_gpu: int):
        self.task, self.gpus = task, range(first_gpu, first_gpu + task.layout.num_gpus)
        self.deadline = time.monotonic() + options.mode_s
        context, address = multiprocessing.get_context(options.method), ("127.0.0.1", free_ports(1)[0])
        self.processes: list[BaseProcess] = []
        self.pipes: dict[Connection, int] = {}
        for rank in range(len(self.gpus)):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=be_rank, args=(sender, options, task, rank, first_gpu, address))
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
    name, loss = f"{row.label} {row.recipe}", row.losses[-1]
    print(f"{name}: {row.step_ms:.1f} ms, {row.peak_gib:.1f} GiB, loss {loss:.4f}", flush=True)
    if path is not None:
        with path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(vars(row)) + "\n")


def table(rows: Sequence[Row]) -> str:
    """All of it for people."""
    medians = list(median_rows(rows))
    bf16 = {(row.layout, row.environment): row.step_ms for row in medians if row.recipe == "bf16"}
    alone = {(row.environment, row.recipe, row.flags): sequences_a_gpu(row) for row in medians if row.num_gpus == 1}
    cells = []
    for row in medians:
        base = bf16.get((row.layout, row.environment))
        one = alone.get((row.environment, row.recipe, row.flags)) or alone.get(("", row.recipe, row.flags))
        cells.append((
            row.label, row.recipe, row.step_ms, base and base / row.step_ms, one and sequences_a_gpu(row) / one,
            row.peak_gib, row.gathered_mb,
        ))  # fmt: skip
    header = ("layout", "recipe", "step ms", "speed to BF16", "scaling", "peak GiB", "gathered MB")
    return timing.format_table(header, cells)


def median_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """One row a task, with the median of its times and its highest peak, in the order of the first round."""
    by_task: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        by_task.setdefault((row.layout, row.environment, row.recipe, row.flags), []).append(row)
    for same in by_task.values():
        step_ms, peak_gib = statistics.median(row.step_ms for row in same), max(row.peak_gib for row in same)
        yield dataclasses.replace(same[0], step_ms=step_ms, peak_gib=peak_gib)


def sequences_a_gpu(row: Row) -> float:
    """Sequences that a GPU trains in a millisecond."""
    return LAYOUTS[row.layout].global_batch / row.num_gpus / row.step_ms


def fitting(num_gpus: int) -> list[str]:
    """The layouts that so many GPUs hold; those with overlapped communication are for who asks for them."""
    return [name for name, layout in LAYOUTS.items() if layout.num_gpus <= num_gpus and "overlapped" not in name]


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="B", help="model; batches are the layouts'")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, help="default: all that the GPUs hold")
    parser.add_argument("--modes", nargs="+", default=list(MODES), help='RECIPE, or "NAME=VALUE RECIPE FLAGS"')
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2, help="of this machine")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--rounds", type=int, default=1, help="times that everything is measured")
    parser.add_argument("--mode-s", type=float, default=120.0, help="seconds after which a mode is given up")
    parser.add_argument("--profile", action="store_true", help="also tell where the time of rank 0 goes")
    parser.add_argument("--extra", default="", help='more flags for every mode: --extra="--flag value"')
    parser.add_argument("--json", type=Path, help="write a line for each measurement to this file")
    options = parser.parse_args(argv)
    options.layouts = options.layouts or fitting(options.gpus)
    for mode in options.modes:
        if not any("=" not in word for word in mode.split()):
            parser.error(f"--modes {mode!r} names no recipe: give {', '.join(MODES_OF_TRAINING)} behind NAME=VALUE")
    if options.profile and not torch.cuda.is_available():
        parser.error("--profile times kernels of a GPU, and this machine has none: leave it out")
    return options


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit status 1 if a mode failed."""
    options = parse(argv)
    with contextlib.suppress(ImportError):  # without Transformer Engine
        gpu_steps.import_everything()
    options.method = gpu_steps.start_method() if torch.cuda.is_available() else "fork"
    if options.json:
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
