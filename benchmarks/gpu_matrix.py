"""Slow cells of dense models: one feature changed at a time, and pairs of features, in BF16, in FP8 and at the peer.

    python benchmarks/gpu_matrix.py --plan                                      (what there is; starts nothing)
    python benchmarks/gpu_matrix.py --shard 1/7 --json FILE [--minutes 9]
    python benchmarks/gpu_matrix.py --shard 1/1 --json FILE --gpus 2            (what needs two GPUs)
    python benchmarks/gpu_matrix.py --table --json FILE                         (what was measured)
    python benchmarks/gpu_matrix.py --tiny --shard 1/1 --json FILE              (to try it on any machine)

`gpu_matrix_blocks.py` has the blocks: a model of 413 million parameters and two layers of llama3-8b's width, each with
a feature changed, in pairs of features, and in other formats. `matrix.py` says what counts as slower, and what is
measured a second time. A shard takes every Nth block, measures what the file lacks, and starts nothing after
`--minutes`: run the shards one after the other, and again until nothing is missing. Shards may run side by side, each
on a GPU of its own (CUDA_VISIBLE_DEVICES). A failure is a row with its last lines; delete the line to measure again.

Every side is a process (`gpu_layouts.py`) that builds the run as `pretrain_gpt.py` does, with all extensions of the
loop, and takes `--warm-up` and `--steps` steps; batches are made before. The step is the median, until its loss is
read. The host's share is the part of two profiled steps in which the GPU is idle. What Hopper has no GEMMs for
(rowwise, mxfp8, nvfp4, quartet2, and maps that Transformer Engine lacks) is emulated, which a warning before step 1
says. A slow cell is named where such a warning, or the reason for which there is no CUDA graph, tells of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Transformer Engine reads it on import, and --fine-grained-activation-offloading needs it.
os.environ.setdefault("NVTE_CPU_OFFLOAD_V1", "1")

from benchmarks import gpu_layouts, gpu_profile, gpu_steps, matrix  # (gpu_steps: before other imports of torch)
from benchmarks.engine_overhead import EngineLoop
from benchmarks.gpu_layout_rows import Layout
from benchmarks.gpu_matrix_blocks import EMULATED_COST, FP8, SHAPES, TINY, Block, blocks
from benchmarks.gpu_matrix_rows import Row, Table, last_line
from benchmarks.matrix import BASE

import torch  # isort: skip
import torch.nn.functional as F  # isort: skip

from megafp8.config.schema.model import ParallelConfig
from megafp8.device.cuda_libraries import cuda_library_versions
from megafp8.device.platform import Platform, limit_device_connections
from megafp8.metrics.sinks import Sinks
from megafp8.training.checks import ValidatedRun, short_warnings
from megafp8.training.cuda_graph import StepGraph
from megafp8.training.evaluation import build_batches
from megafp8.training.extension import Extension, LoopState
from megafp8.training.run import Run
from megafp8.training.setup import build_training_run
from megafp8.training.step import StepResult

ERROR_LINES = 12
START_S = 5.0  # of a process with its model and its first steps, for the plan
CPU_FUSIONS = ("apply_rope_fusion", "cross_entropy_loss_fusion", "masked_softmax_fusion", "bias_dropout_fusion")
"""The peer's, which are for GPUs."""
WARM_UP = 4  # a CUDA graph is captured in the fourth step


class Task(NamedTuple):
    """A side of a block, as `gpu_layouts.Running` takes it."""

    block: Block
    side: str

    @property
    def mode(self) -> str:
        """RECIPE FLAGS, or @RECIPE."""
        return self.block.sides[self.side]

    @property
    def is_peer(self) -> bool:
        """Whether megatron-core's loop trains."""
        return self.mode.startswith("@")

    @property
    def flags(self) -> str:
        """All of megafp8."""
        return f"{self.block.flags} {gpu_steps.flags_of_mode(self.mode)}"

    @property
    def own_flags(self) -> list[str]:
        """Those that the default model does not have in BF16 or FP8; none of the peer's."""
        if self.is_peer:
            return []
        words = gpu_steps.flags_of_mode(self.mode).split()
        usual = f"{gpu_steps.flags_of_mode(BASE)} {gpu_steps.flags_of_mode(FP8)}".split()
        return [*self.block.own_flags, *(word for word in words if word.startswith("--") and word not in usual)]

    @property
    def layout(self) -> Layout:
        """The number of ranks."""
        return Layout(self.block.num_gpus)

    @property
    def environment(self) -> dict[str, str]:
        """None of its own."""
        return {}

    def __str__(self) -> str:
        return f"{self.block.shape}, {self.block.name}, {self.side}"


# ---- in a rank ----------------------------------------------------------------------------------------------------


class Losses(Extension):
    """The loss of each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def after_step(self, state: LoopState, result: StepResult) -> None:
        self.values.append(result.loss)


def measure(options: argparse.Namespace, task: Task) -> Row:
    """Build a side on this rank and train."""
    return measure_peer(options, task) if task.is_peer else measure_megafp8(options, task)


def measure_megafp8(options: argparse.Namespace, task: Task) -> Row:
    """The steps of `pretrain_gpt.py`."""
    validated = gpu_steps.check_flags(task.flags)
    config = validated.invocation.config
    platform = gpu_layouts.join(config.parallel)
    run = build_training_run(config, platform, validated.implementation)
    num_steps = options.warm_up + options.steps + gpu_profile.PROFILED_STEPS
    loop, losses = EngineLoop(run, Sinks(()), num_steps), Losses()
    loop.extensions.append(losses)
    replace_batches(loop.state, num_steps)
    times_ms = timed(loop.step, options, platform)
    # Steps with statistics have graphs of their own, which `is_captured` does not count.
    has_graph = isinstance(run.graph, StepGraph) and run.graph.pool is not None
    peak = gpu_layouts.peak_gib(platform)
    idle = idle_fraction(loop.step) if platform.kind == "cuda" else None
    run.graph.reset()  # NCCL cannot destroy a communicator that a CUDA graph uses
    found = {"losses": losses.values, "has_graph": has_graph, "idle": idle, "said": said_of(validated)}
    return row_of(task, times_ms, peak, platform, found)


def replace_batches(state: LoopState, num_steps: int) -> None:
    """Make the batches before the first step, as loader processes do that keep up."""
    run: Run = state.run
    state.close()
    batches = build_batches(run, run.datasets[0], 0, num_steps * run.global_batch_size, num_workers=0)
    if batches is not None:
        made = list(batches)
        state.batches = (batch for batch in made)


def said_of(validated: ValidatedRun) -> list[str]:
    """What a run says of its settings before step 1: its warnings, and why its steps are no CUDA graph."""
    graph = [
        f"{each.flag} {each.value} ({each.reason})" for each in validated.choices if each.flag == "--cuda-graph-impl"
    ]
    return [*short_warnings(validated.warnings), *(text for text in graph if " none " in text)]


def idle_fraction(step: Callable[[], None]) -> float:
    """The part of the time of two steps in which no kernel runs."""
    profile = gpu_profile.profiled(step)
    return 1 - profile.busy_ms() / profile.span_ms()


def measure_peer(options: argparse.Namespace, task: Task) -> Row:
    """megatron-core's loop, with its fastest settings."""
    from megatron.core.activations import squared_relu

    from benchmarks.megatron_loop import Division, PeerLoop

    changes, layout = task.block.peer_changes(), task.block.layout
    division = Division(**(layout.division if layout and layout.division else {}))
    limit_device_connections(division.tensor)
    platform = gpu_layouts.join(ParallelConfig())
    if "activation_func" in changes:
        changes["activation_func"] = {"gelu": F.gelu, "squared_relu": squared_relu}[changes["activation_func"]]
    optimizer = changes.pop("optimizer", {})
    dtypes = {name: getattr(torch, value) for name, value in optimizer.items() if name.endswith("_dtype")}
    loop = PeerLoop(
        "A",  # all of whose sizes are changed
        task.mode.removeprefix("@"),
        fused_operations=changes.get("activation_func") is not squared_relu,  # which they lack
        turned_off=CPU_FUSIONS if platform.kind == "cpu" else (),
        division=division,
        device=platform.device.type,
        changes=changes | {"optimizer": optimizer | dtypes},
    )
    losses = list[float]()
    times_ms = timed(lambda: losses.append(loop.step(len(losses))), options, platform)
    return row_of(task, times_ms, gpu_layouts.peak_gib(platform), platform, {"losses": losses})


def timed(step: Callable[[], None], options: argparse.Namespace, platform: Platform) -> list[float]:
    """Milliseconds of each step after the first ones."""
    for _ in range(options.warm_up):
        step()
    gpu_layouts.meet(platform)
    times = [time.perf_counter()]
    for _ in range(options.steps):
        step()  # reads its loss
        times.append(time.perf_counter())
    return [1e3 * (after - before) for before, after in zip(times[:-1], times[1:], strict=True)]


def row_of(task: Task, times_ms: list[float], peak_gib: float, platform: Platform, found: Mapping[str, Any]) -> Row:
    """The row of a side that trained."""
    step_ms = statistics.median(times_ms)
    return Row(
        shape=task.block.shape, block=task.block.name, side=task.side, own_flags=task.own_flags, step_ms=step_ms,
        times_ms=[round(each, 2) for each in times_ms], tokens_per_second=1e3 * task.block.tokens / step_ms,
        peak_gib=peak_gib, device=platform.name, cuda_versions=cuda_library_versions(), **found,
    )  # fmt: skip


# ---- around the ranks ---------------------------------------------------------------------------------------------


def trained(options: argparse.Namespace, task: Task) -> Row:
    """What the ranks of a side measure, or how they failed."""
    run, row = gpu_layouts.Running(options, task, 0, measure), None
    failures = dict[str, str]()
    try:
        while not gpu_layouts.is_over(run, failures):
            for pipe in wait(list(run.pipes), timeout=1.0):
                said = run.receive(pipe)
                if isinstance(said, str):
                    failures.setdefault(str(task), said)
                row = row or (said if isinstance(said, Row) else None)
    finally:
        run.end()
    if row is not None and not failures:
        return row
    error = "\n".join(failures.get(str(task), "no row").splitlines()[-ERROR_LINES:])
    return Row(shape=task.block.shape, block=task.block.name, side=task.side, own_flags=task.own_flags, error=error)


def measure_blocks(options: argparse.Namespace, all_blocks: Sequence[Block]) -> None:
    """What the file lacks of a shard's blocks, until the time is over."""
    deadline = time.monotonic() + 60 * options.minutes
    table = Table(all_blocks, options.json)
    complete = [block for block in all_blocks if set(block.sides) <= set(table.rows(block))]
    for block in matrix.blocks_of(options.shard, all_blocks, complete):
        for side in table.missing(block):
            if time.monotonic() > deadline:
                return
            task, began = Task(block, side), time.monotonic()
            row = trained(options, task)
            with options.json.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(row)) + "\n")
            result = f"{row.step_ms:.1f} ms" if row.step_ms else f"failed: {last_line(row.error)}"
            print(f"{task}: {result}, {time.monotonic() - began:.0f} s", flush=True)


def planned(task: Task) -> ValidatedRun:
    """A side of megafp8, checked as on an H200.

    Raises:
        ConfigError: it is refused.
    """
    return gpu_steps.check_flags(f"{task.flags} --dry-run --target h200 --world-size {task.block.num_gpus}")


def plan(options: argparse.Namespace, all_blocks: Sequence[Block]) -> str:
    """Every side with its flags, what it says before step 1 on an H200, and a rough time."""
    lines, total_s = list[str](), 0.0
    for task in (Task(block, side) for block in all_blocks for side in block.sides):
        emulates, said, flags = False, "", task.mode
        if not task.is_peer:
            validated = planned(task)
            emulates, flags = validated.implementation.emulates, task.flags
            said = "".join(f"\n    {text}" for text in said_of(validated))
        num_steps = options.warm_up + options.steps + gpu_profile.PROFILED_STEPS
        us = SHAPES[task.block.shape].us_a_token * (EMULATED_COST if emulates else 1)
        seconds = START_S + num_steps * task.block.tokens * us / 1e6
        total_s += seconds
        lines.append(f"{task}, about {seconds:.0f} s: {flags}{said}")
    return "\n".join([*lines, f"{len(all_blocks)} blocks with {len(lines)} sides, about {total_s:.0f} s"])


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    matrix.add_options(parser)
    parser.add_argument("--json", type=Path, help="file with the rows of all shards, a line each")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="measure blocks that need so many")
    parser.add_argument("--only", nargs="+", metavar="BLOCK", help="blocks with these names")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--mode-s", type=float, default=120.0, help="seconds after which a side is given up")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try it on any machine")
    parser.add_argument("--plan", action="store_true", help="print what there is to measure, and start nothing")
    parser.add_argument("--table", action="store_true", help="print the table, and start nothing")
    options = parser.parse_args(argv)
    if options.json is None and not options.plan:
        parser.error("give --json FILE, with the rows of all shards, or --plan")
    return options


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit status 1 while something is missing."""
    options = parse(argv)
    all_blocks = blocks([TINY] if options.tiny else [name for name in SHAPES if name != TINY])
    if options.only:
        if unknown := set(options.only) - {block.name for block in all_blocks}:
            sys.exit(f"--only: there is no {' and no '.join(sorted(unknown))}: --plan lists the blocks")
        all_blocks = [block for block in all_blocks if block.name in options.only]
    mine = [block for block in all_blocks if block.num_gpus == options.gpus]
    if options.plan:
        print(plan(options, matrix.blocks_of(options.shard, mine, []) if options.shard else mine))
        return 0
    is_measuring = options.shard is not None and not options.table
    if is_measuring:
        with contextlib.suppress(ImportError):  # without Transformer Engine
            gpu_steps.import_everything()
        options.method = gpu_steps.start_method() if torch.cuda.is_available() else "fork"
        measure_blocks(options, mine)
    table = Table(all_blocks, options.json)
    print(table.summary() if is_measuring else table.text())
    return 1 if any(table.missing(block) for block in all_blocks) else 0


if __name__ == "__main__":
    sys.exit(main())
