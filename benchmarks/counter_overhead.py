"""Cost of the counters of non-finite and saturated operands, on a CPU.

    python benchmarks/counter_overhead.py [--recipe tensorwise] [--rounds 30] [--json FILE]

One run trains with and without counters, alternating step by step, on one CPU rank with one thread. The ratio contains
everything that a step adds. On a shared machine its interval is several percent wide, so that the CPU time in the
functions of the counters is also summed: the checks in the quantizers, the reset of the table, and its totals.

The bar of 0.3% is for kernel time on a GPU (`gpu_counters.py`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import timing
from benchmarks.in_process import add_size_options, command_line, end_runs, start_run
from megafp8.checkpoint.progress import Progress
from megafp8.models.layer_runtime import emulated_linears_by_name
from megafp8.nonfinite.operands import OperandMonitor
from megafp8.quantization import quantize
from megafp8.training.evaluation import build_batches
from megafp8.training.run import Run
from megafp8.training.step import train_step

WITHOUT, WITH = "without", "with"
RECIPES = {
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1",
    "quartet2": "--fp4-format e2m1 --fp4-recipe quartet2 --ffn-hidden-size 1408",
}


def build_steps(run: Run, num_steps: int) -> dict[str, Callable[[], float]]:
    """A function for each side that takes one training step of the same run and returns its loss."""
    batches = build_batches(run, run.datasets[0], 0, num_steps * run.global_batch_size, num_workers=0)
    steps, monitor = iter(range(num_steps)), run.bad_steps.operands
    linears = [linear for _, linear in emulated_linears_by_name(run.training_state.chunks)]
    counts = [linear.counts for linear in linears]

    def step(counter: OperandMonitor) -> float:
        for linear, own in zip(linears, counts, strict=True):
            linear.counts = own if counter is monitor else None
        run.bad_steps.operands = counter
        return train_step(run, batches, Progress(next(steps))).loss

    return {WITHOUT: lambda: step(OperandMonitor()), WITH: lambda: step(monitor)}


class CpuTime:
    """CPU time of this thread in some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args)
            finally:
                self.seconds += time.thread_time() - started

        return timed


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each side")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each side before them")
    parser.add_argument("--recipe", choices=RECIPES, default="tensorwise")
    parser.add_argument("--json", type=Path, metavar="FILE")
    add_size_options(
        parser, num_layers=4, hidden_size=512, num_attention_heads=8, seq_length=256, vocab_size=4096,
        micro_batch_size=4, global_batch_size=4,
    )  # fmt: skip
    options = parser.parse_args(argv)
    num_steps = 2 * (options.rounds + options.warmup)
    flags = f"--bf16 --transformer-impl emulated --fp8-amax-reduction te {RECIPES[options.recipe]}"
    run = start_run(command_line(options, num_steps, flags))
    spent, monitor = CpuTime(), run.bad_steps.operands
    quantize.count_values = spent.of(quantize.count_values)
    monitor.reset, monitor.counts = spent.of(monitor.reset), spent.of(monitor.counts)
    times = timing.take_turns(build_steps(run, num_steps), rounds=options.rounds, warmup=options.warmup)
    end_runs()
    ratios = timing.ratios_to(WITHOUT, times)[WITH]
    rows = [(name, side.median_wall_ms, side.median_cpu_ms) for name, side in times.items()]
    print(timing.format_table(("counters", "wall ms", "CPU ms"), rows))
    print(timing.describe_quiet(times))
    clock = timing.clock_to_trust(times)
    ratio = ratios[clock]
    shown = [f"{(value - 1):+.2%}" for value in (ratio.median, ratio.low, ratio.high)]
    print(f"{options.recipe}: {shown[0]} of a step, 95% interval {shown[1]} to {shown[2]} ({clock} time)")
    share = spent.seconds * 1e3 / (options.rounds + options.warmup) / times[WITHOUT].median_cpu_ms
    print(f"{options.recipe}: {share:.3%} of a step's CPU time in the functions of the counters")
    if options.json:
        timing.write_json(options.json, {"options": vars(options), "ratios": ratios, "share": share, "times": times})


if __name__ == "__main__":
    main()
