"""Cost of quantization statistics: steps with statistics, compared with steps without.

    python benchmarks/telemetry_overhead.py [--rounds 12] [--fp8-what-if mxfp8,nvfp4] [--recipe delayed] [--json FILE]

One run collects statistics in every third step (`--fp8-log-interval 3`), from the batch to the record in all sinks.
The step after it writes the record, so its extra time belongs to the statistics, and both are compared with the step
before them. At an interval of 100 steps the cost is a hundredth of the difference, because all other steps are
unaffected. Bar: 2% of the step time at an interval of 100. On a CPU: one rank and one thread. On a GPU: the layers that
run there, steps as CUDA graphs, and wall time. The number of launched operations, those of a graph included, and of
waits of the host (`operations.py`) is that of one more step each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import timing
from benchmarks.engine_overhead import EngineLoop
from benchmarks.in_process import add_size_options, command_line, end_runs, validated_flags
from benchmarks.operations import Operations, count_operations
from megafp8.device.platform import detect_platform
from megafp8.metrics.sinks import build_sinks
from megafp8.training.setup import build_training_run

BAR, INTERVAL, WARMUP = 0.02, 100, 5  # on a GPU, steps of both kinds are graphs after four of each
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


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Measure and print."""
    options = build_parser().parse_args(argv)
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
