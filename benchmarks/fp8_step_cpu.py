"""Time of a training step with emulated FP8 linear layers, compared with BF16 and FP32, on a CPU.

    python benchmarks/fp8_step_cpu.py [--rounds 20] [--profile] [--json FILE]

All train the same model on the same samples, alternating in one process on one CPU rank with one thread. The recipes
run on BF16 parameters, as with `pretrain_gpt.py --bf16 --fp8-format hybrid --fp8-recipe tensorwise`. `--profile` shows
where the first recipe spends more time than BF16. Bars, at hidden size 512: see BARS.

With `--compile`, and `TORCH_COMPILE_DISABLE=0` in the environment, BF16 and the first recipe also run with their layers
compiled by torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from benchmarks import timing
from benchmarks.in_process import add_run, add_size_options, command_line, end_runs, start_run
from megafp8.checkpoint.progress import Progress
from megafp8.training.evaluation import build_batches
from megafp8.training.run import Run
from megafp8.training.step import train_step

BASELINE, FP8 = "bf16", "tensorwise"
# Most that the median step of a recipe may cost, in steps of BF16.
BARS = {FP8: 1.5, "delayed": 1.5, "blockwise": 1.8, "mxfp8": 1.8, "nvfp4": 3.0}
EMULATED = "--bf16 --transformer-impl emulated"
MODES = {
    BASELINE: "--bf16 --transformer-impl local",
    FP8: f"{EMULATED} --fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": f"{EMULATED} --fp8-format hybrid --fp8-recipe delayed",
    "blockwise": f"{EMULATED} --fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": f"{EMULATED} --fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": f"{EMULATED} --fp4-format e2m1",
    "fp32": "--transformer-impl local",
}
# What an emulated linear does, by the functions that do it. None of them calls another of the list.
PARTS = {
    "amax": (
        "quantization/scaling.py compute_amax",
        "quantization/scaling.py block_amax",
        "quantization/scaling.py reduce_amax",
    ),
    "scale": ("quantization/scaling.py quant_scale_of",),
    "multiply, round to codes": ("quantization/quantize.py scale_and_cast",),
    "decode": ("quantization/rounding.py decode",),
    "GEMMs": ("quantization/scaled_gemm.py emulated_gemm",),
}
WHOLE = (
    "quantization/linear.py forward",
    "quantization/linear.py backward",
    "quantization/linear_plan.py quantize_weight",
)


def build_steps(options: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """For each mode a function that takes one training step and returns its loss."""
    train_iters = options.rounds + options.warmup + options.profile_steps
    runs: dict[str, Run] = {}
    for mode, flags in MODES.items():
        text = command_line(options, train_iters, flags)
        runs[mode] = add_run(runs[BASELINE], text) if runs else start_run(text)
    for mode in (BASELINE, FP8) if options.compile else ():
        runs[f"{mode}, compiled"] = add_run(runs[BASELINE], command_line(options, train_iters, MODES[mode]))
        compile_layers(runs[f"{mode}, compiled"])
    return {mode: stepper(run, train_iters) for mode, run in runs.items()}


def compile_layers(run: Run) -> None:
    """Let torch compile the forward pass of each layer, and with it the backward pass."""
    for chunk in run.training_state.chunks:
        for layer in chunk.modules():
            if isinstance(layer, TransformerLayer):
                layer.forward = torch.compile(layer.forward)


def stepper(run: Run, train_iters: int) -> Callable[[], float]:
    """The steps of one run."""
    batches = build_batches(run, run.datasets[0], 0, train_iters * run.global_batch_size, num_workers=0)
    steps = iter(range(train_iters))
    return lambda: train_step(run, batches, Progress(next(steps))).loss


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All modes in turns, and with `--profile` the parts of a step in FP8."""
    steps = build_steps(options)
    times = timing.take_turns(steps, rounds=options.rounds, warmup=options.warmup)
    calls = timing.profile_calls(steps[FP8], options.profile_steps, "megafp8") if options.profile else []
    end_runs()
    return {"times": times, "calls": calls}


def parts_of(calls: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Milliseconds of each part of the emulated linears in one step; the rest is Python and autograd."""
    ms = {name: spent for name, _, spent in calls}
    parts = {part: sum(ms.get(name, 0.0) for name in names) for part, names in PARTS.items()}
    parts["rest of the linears"] = sum(ms.get(name, 0.0) for name in WHOLE) - sum(parts.values())
    return parts


def report(measured: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Print the tables and return what goes into the JSON."""
    times: dict[str, timing.Times] = measured["times"]
    ratios = timing.ratios_to(BASELINE, times)
    header = ("step", "wall ms", "CPU ms", "tokens/s", "to BF16, wall [95%]", "to BF16, CPU [95%]")
    rows = [
        (mode, side.median_wall_ms, side.median_cpu_ms, tokens / side.median_cpu_ms * 1e3, *ratios[mode].values())
        for mode, side in times.items()
    ]
    print(timing.format_table(header, rows))
    print(timing.describe_quiet(times))
    clock = timing.clock_to_trust(times)
    medians = {mode: ratios[mode][clock].median for mode in BARS}
    for mode, bar in BARS.items():
        print(f"{mode}: {medians[mode]:.2f} is {'within' if medians[mode] <= bar else 'OVER'} the bar of {bar}")
    parts = parts_of(measured["calls"]) if measured["calls"] else {}
    if parts:
        print("\nthe emulated linears of one step, profiled:")
        total = sum(parts.values())
        print(timing.format_table(("part", "ms", "share"), [(p, ms, f"{ms / total:.0%}") for p, ms in parts.items()]))
    return {"ratios": ratios, "medians": medians, "bars": BARS, "parts_ms": parts,
            "lost_fraction": timing.lost_fraction(times)}  # fmt: skip


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_size_options(
        parser, num_layers=4, hidden_size=512, num_attention_heads=8, seq_length=256, vocab_size=4096,
        micro_batch_size=4, global_batch_size=4,
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each mode")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each mode before them")
    parser.add_argument("--profile", action="store_true", help="also show the parts of the emulated linears")
    parser.add_argument("--profile-steps", type=int, default=5, help="steps under the profiler")
    parser.add_argument("--compile", action="store_true", help="also with layers compiled by torch")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(argv)
    if options.compile and os.environ.get("TORCH_COMPILE_DISABLE") != "0":
        parser.error("--compile needs TORCH_COMPILE_DISABLE=0 in the environment: without it torch compiles nothing")

    tokens = options.global_batch_size * options.seq_length
    print(
        f"one training step, hidden {options.hidden_size}, {options.num_layers} layers, {tokens} tokens in "
        f"{options.global_batch_size // options.micro_batch_size} microbatch(es), 1 thread"
    )
    measured = measure(options)
    result = report(measured, tokens)
    if options.json:
        timing.write_json(options.json, {"options": vars(options), **result, "times": measured["times"]})


if __name__ == "__main__":
    main()
