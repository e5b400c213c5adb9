"""Cost of quantization statistics: steps with statistics, compared with steps without.

    python benchmarks/telemetry_overhead.py [--rounds 12] [--fp8-what-if mxfp8,nvfp4] [--recipe delayed] [--json FILE]
    python benchmarks/telemetry_overhead.py --sinks 2000

One run collects statistics in every third step (`--fp8-log-interval 3`), from the batch to the record in all sinks.
The step after it writes the record, so its extra time belongs to the statistics, and both are compared with the step
before them. At an interval of 100 steps the cost is a hundredth of the difference, because all other steps are
unaffected. Bar: 2% of the step time at an interval of 100. On a CPU: one rank and one thread. On a GPU: the layers that
run there, steps as CUDA graphs, and wall time. The number of launched operations, those of a graph included, and of
waits of the host (`operations.py`) is that of one more step each.

With `--sinks`: the time in which the training thread writes the record of a step to each sink, and that of the other
threads of its process meanwhile. MLflow writes to a file store; another process reads the metrics port 10 times a
second. Bar: 0.2% of a step of 100 ms for each.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import timing
from benchmarks.engine_overhead import EngineLoop
from benchmarks.in_process import add_size_options, command_line, end_runs, validated_flags
from benchmarks.operations import Operations, count_operations
from megafp8.config.schema import LoggingConfig
from megafp8.device.platform import detect_platform
from megafp8.metrics.records import StepRecord
from megafp8.metrics.sinks import build_sinks
from megafp8.training.setup import build_training_run

BAR, INTERVAL, WARMUP = 0.02, 100, 5  # on a GPU, steps of both kinds are graphs after four of each
SINK_BAR, STEP_MS, PAUSE_S = 0.002, 100.0, 0.002
HOST = "127.0.0.1"
READER = "import time, urllib.request\nwhile True:\n    urllib.request.urlopen('{}').read()\n    time.sleep(0.1)"
PLAIN, STATISTICS, NEXT = "plain", "statistics", "the next"
RECIPES = {
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1",
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--recipe", choices=RECIPES, default="tensorwise")
    parser.add_argument("--fp8-what-if", metavar="RECIPES", help="recipes to try as well")
    parser.add_argument("--sinks", type=int, metavar="STEPS", help="only measure the sinks, for so many steps")
    parser.add_argument("--json", type=Path, metavar="FILE")
    add_size_options(
        parser, num_layers=4, hidden_size=512, num_attention_heads=8, seq_length=512, vocab_size=4096,
        micro_batch_size=2, global_batch_size=4,
    )  # fmt: skip
    return parser


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, timing.Times], dict[str, Operations]]:
    """Times of plain steps, statistics steps and those after them, round by round, and operations of one each."""
    sides = (PLAIN, STATISTICS, NEXT)
    steps = len(sides) * (options.rounds + WARMUP + 1) + 1
    what_if = f" --fp8-what-if {options.fp8_what_if}" if options.fp8_what_if else ""
    graph = " --cuda-graph-impl local" if torch.cuda.is_available() else ""
    text = command_line(options, steps, f"--bf16 {RECIPES[options.recipe]} --fp8-log-interval 3{what_if}{graph}")
    validated = validated_flags(text)
    run = build_training_run(validated.invocation.config, detect_platform(), validated.implementation)
    times = {side: timing.Times() for side in sides}
    with build_sinks(run.config.logging, run_folder=str(folder), total_steps=steps, stream=sys.stderr) as sinks:
        loop = EngineLoop(run, sinks, steps)

        def step() -> None:
            loop.step()
            run.platform.synchronize()

        step()  # so that the third, sixth... of the run are in the middle
        for number in range(steps - 1 - len(sides)):
            wall_ms, cpu_ms = timing.own_times_ms(step)
            if number >= len(sides) * WARMUP:
                side = times[sides[number % len(sides)]]
                side.wall_ms.append(wall_ms)
                side.cpu_ms.append(cpu_ms)
        operations = {side: count_operations(step) for side in times}
    end_runs()
    return times, operations


def measure_sinks(num_steps: int, folder: Path) -> list[list[Any]]:
    """Name of each sink, microseconds of a record in the training thread, share of a step, those of other threads."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    logging = LoggingConfig(
        metrics_port=port, mlflow_experiment="cost", mlflow_tracking_uri=f"file:{folder}/store", log_interval=10**6
    )
    rows = []
    with build_sinks(logging, run_folder=str(folder / "run"), total_steps=num_steps, stream=sys.stderr) as sinks:
        reader = subprocess.Popen([sys.executable, "-c", READER.format(f"http://{HOST}:{port}/metrics")])
        for sink in sinks._sinks:
            mine, others = 0.0, time.process_time() - time.thread_time()
            for step in range(1, num_steps + 1):
                record = StepRecord(
                    step=step, consumed_samples=step * 16, consumed_tokens=step * 4096, loss=4.0, learning_rate=3e-4,
                    step_ms=STEP_MS, tokens_per_second=40960.0, grad_norm=1.25, global_batch_size=16, clip_factor=0.8,
                    model_tflops_per_device=400.0, mfu_fraction=0.4, memory_peak_bytes=1 << 36,
                    timers_ms={"records": 1.0, "data-wait": 0.1}, between_ms={"checkpoints": 10.0},
                )  # fmt: skip
                started = time.thread_time()
                sink.write(record)
                mine += time.thread_time() - started
                time.sleep(PAUSE_S)  # the device computes
            others = time.process_time() - time.thread_time() - others
            each_us = mine / num_steps * 1e6
            share = each_us / 1000 / STEP_MS
            verdict = f"{share:.3%}{'' if share <= SINK_BAR else ' ABOVE'}"
            rows.append([type(sink).__name__, each_us, verdict, others / num_steps * 1e6])
        reader.kill()
    return rows


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Measure and print."""
    options = build_parser().parse_args(argv)
    if options.sinks:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure_sinks(options.sinks, Path(folder))
        print(timing.format_table(["sink", "us a step", "of 100 ms", "other threads, us"], rows))
        return
    with tempfile.TemporaryDirectory() as folder:
        times, operations = measure(options, Path(folder))
    clock = "wall" if torch.cuda.is_available() else timing.clock_to_trust(times)
    ratios = timing.ratios_to(PLAIN, times)
    rows = [
        [name, side.median_wall_ms, side.median_cpu_ms, operations[name].launched, operations[name].waits]
        for name, side in times.items()
    ]
    print(timing.format_table(["step", "wall ms", "CPU ms", "operations", "waits"], rows))
    in_units = {side: ratios[side][clock] for side in (STATISTICS, NEXT)}
    share = sum(ratio.median - 1 for ratio in in_units.values()) / INTERVAL
    verdict = "within" if share <= BAR else "ABOVE"
    print(
        f"\n{options.recipe}: a statistics step takes {in_units[STATISTICS]} times a plain one, the step after it "
        f"{in_units[NEXT]} times ({clock} time, {options.rounds} rounds)\nat an interval of {INTERVAL}: {share:.2%} of "
        f"the step time ({verdict} the bar of {BAR:.0%})\n{timing.describe_quiet(times)}"
    )
    if options.json:
        result = {"times": times, "operations": operations, "ratios": in_units, "clock": clock, "share": share}
        timing.write_json(options.json, result)


if __name__ == "__main__":
    main()
