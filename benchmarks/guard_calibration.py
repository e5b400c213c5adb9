"""Statistics of `--fp8-guard` in clean runs and after planted faults, beside their limits.

    python benchmarks/guard_calibration.py [--seeds 5] [--steps 100] [--json FILE]

Each recipe trains a small model with each seed; the statistics are taken every 20 steps, and their largest values are
those of clean runs. Then each fault is planted into the trained weights, one at a time, and the statistics of one
step are taken. A limit is good if it lies between both columns of its statistic.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from megatron.core.utils import unwrap_model

from benchmarks import timing
from benchmarks.in_process import add_run, add_size_options, command_line, end_runs, start_run
from megafp8.checkpoint.progress import Progress
from megafp8.metrics.layer_statistics import LIMITS
from megafp8.models.layer_runtime import emulated_linears_by_name
from megafp8.training.evaluation import build_batches
from megafp8.training.extensions.guard import Key, LayerStatistics, layer_snr
from megafp8.training.run import Run
from megafp8.training.step import forward_backward, train_step

INTERVAL = 20
RECIPES = {
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}
MODEL = (
    "--bf16 --transformer-impl emulated --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --fp8-amax-reduction te --fp8-guard warn"
)
FAULTS = {
    "aligned SwiGLU weights": "SwiGLU alignment",
    "inflated QK": "attention logits",
    "outlier channel": "outlier share",
    "outlier value": "kurtosis",
    "outlier token": "subnormal share",
    "large residual": "residual",
}
"""Planted faults, each with the statistic that must exceed its limit."""
OUTLIERS = {"outlier value": (1, 1, 1e3), "outlier channel": (None, 1, 1e3), "outlier token": (1, None, 1e7)}
"""Rows and channels of SwiGLU's output that a fault multiplies, None for all, and the factor."""


@contextmanager
def planted(run: Run, fault: str, layer: int) -> Iterator[None]:
    """A fault in one layer of the model of this rank; it is removed afterwards."""
    linears = dict(emulated_linears_by_name(run.training_state.chunks))
    blocks = [block for chunk in unwrap_model(run.training_state.chunks) for block in chunk.decoder.layers]
    weights = {name: linear.weight for name, linear in linears.items() if name.startswith(f"layers.{layer}.")}
    copies = {name: weight.detach().clone() for name, weight in weights.items()}
    handle: Optional[Any] = None
    with torch.no_grad():
        if fault == "aligned SwiGLU weights":
            gate, linear = weights[f"layers.{layer}.linear_fc1"].detach().chunk(2)
            gate[:4] = -linear[:4]
        elif fault == "inflated QK":
            weights[f"layers.{layer}.linear_qkv"].mul_(256)
        elif fault == "large residual":
            handle = blocks[layer].register_forward_hook(lambda _, args, output: (output[0] * 1e6, *output[1:]))
        else:
            rows, channels, factor = OUTLIERS[fault]

            def spoil(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
                spoiled = args[0].clone()
                spoiled.view(-1, spoiled.shape[-1])[:rows, :channels] *= factor
                return (spoiled, *args[1:])

            handle = blocks[layer].mlp.linear_fc2.register_forward_pre_hook(spoil)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
        with torch.no_grad():
            for name, copy in copies.items():
                weights[name].copy_(copy)


def statistics_of(run: Run, batches: Any) -> dict[Key, float]:
    """The statistics of one forward-backward."""
    collector = LayerStatistics(run)
    with collector.start().attached():
        forward_backward(run, batches, run.num_microbatches, forward_only=False)
    return collector.take()


def largest(values: Sequence[dict[Key, float]]) -> dict[str, float]:
    """The largest value of each statistic."""
    return {
        statistic: max(
            (value for each in values for (name, _), value in each.items() if name == statistic), default=-1.0
        )
        for statistic in LIMITS
    }


def measure(run: Run, num_steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """The largest statistics of a clean run, and by fault that of its statistic afterwards."""
    num_batches = num_steps + num_steps // INTERVAL + 2 * len(FAULTS)
    batches = build_batches(run, run.datasets[0], 0, num_batches * run.global_batch_size, num_workers=0)
    clean = []
    for step in range(num_steps):
        train_step(run, batches, Progress(step))
        if (step + 1) % INTERVAL == 0:
            clean.append(statistics_of(run, batches) | layer_snr(run))
    found = {}
    for fault, statistic in FAULTS.items():
        with planted(run, fault, layer=1):
            statistics_of(run, batches)  # a scale of delayed scaling that is from before saturates, and hides the fault
            found[fault] = largest([statistics_of(run, batches)])[statistic]
    return largest(clean), found


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="of each clean run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    add_size_options(
        parser, num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=256,
        micro_batch_size=4, global_batch_size=4,
    )  # fmt: skip
    options = parser.parse_args(argv)
    num_steps = options.steps + options.steps // INTERVAL + 2 * len(FAULTS)
    first: Optional[Run] = None
    clean: dict[str, float] = dict.fromkeys(LIMITS, -1.0)
    faulty: dict[str, float] = {}
    for recipe in RECIPES.values():
        for seed in range(options.seeds):
            text = command_line(options, num_steps, f"{MODEL} {recipe} --seed {seed + 1}")
            run = start_run(text) if first is None else add_run(first, text)
            first = first or run
            values, found = measure(run, options.steps)
            clean = {statistic: max(clean[statistic], value) for statistic, value in values.items()}
            faulty = {fault: min(value, faulty.get(fault, value)) for fault, value in found.items()}
    end_runs()
    of_statistic = {statistic: fault for fault, statistic in FAULTS.items()}
    rows = [
        (name, clean[name], limit.value, of_statistic.get(name, ""), faulty.get(of_statistic.get(name, "")))
        for name, limit in LIMITS.items()
    ]
    header = ("statistic", "largest, clean", "limit", "planted fault", "smallest, planted")
    print(f"{len(RECIPES)} recipes, {options.seeds} seeds, {options.steps} steps")
    print(timing.format_table(header, rows))
    if options.json:
        timing.write_json(options.json, {"options": vars(options), "clean": clean, "planted": faulty})


if __name__ == "__main__":
    main()
