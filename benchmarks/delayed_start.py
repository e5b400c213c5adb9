"""Start of delayed scaling: the first gradient and the first losses, with scales of 1 and with calibrated scales.

    python benchmarks/delayed_start.py [--seeds 1 2 3] [--steps 40] [--depths 2 8 16]

Four runs start from the same weights on the same real text: BF16, tensorwise, and delayed with `--fp8-delayed-start
calibrated` and with `te`. Tensorwise has suitable scales from the first step on, so it is the upper limit for delayed
scaling. The learning rate has no warmup, so that the effect of the first update is visible, and is low, because at a
high one any two runs diverge within ten steps. Two measures, relative to BF16 with the same seed:

    first gradient    |g - g_bf16| / |g_bf16| over all parameters
    losses            root mean square over the seeds of the difference at each step

All runs are in one process on one CPU rank with one thread, and one microbatch per step: from the second microbatch on,
Transformer Engine also has scales.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import stdlib_text, timing
from benchmarks.in_process import add_run, end_runs, start_run
from megafp8.checkpoint.progress import Progress
from megafp8.training.evaluation import build_batches
from megafp8.training.extensions.calibration import calibrate, needs_calibration
from megafp8.training.run import Run
from megafp8.training.step import train_step

BASELINE, CALIBRATED, TE = "bf16", "delayed, calibrated", "delayed, te"
STARTS: Mapping[str, str] = {
    BASELINE: "",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    CALIBRATED: "--fp8-format hybrid --fp8-recipe delayed",
    TE: "--fp8-format hybrid --fp8-recipe delayed --fp8-delayed-start te",
}
COLORS = {"tensorwise": "#868e96", CALIBRATED: "#1971c2", TE: "#e8590c"}
# Clipping would change the gradient before it is read; Adam does not mind its length.
TRAINING = (
    "--bf16 --micro-batch-size 16 --global-batch-size 16 --lr 2e-4 --lr-decay-style constant --weight-decay 0.1 "
    "--adam-beta2 0.95 --clip-grad 0 --eval-iters 0 --num-threads 1 --num-workers 0 --no-progress-bar"
)


@dataclass(frozen=True)
class Start:
    """The first steps of one run.

    Attributes:
        gradient: of the first step, all parameters flat, FP32.
        losses: nats per token.
    """

    gradient: Tensor
    losses: tuple[float, ...]


def starts_of(seed: int, depth: int, steps: int, data: Path, model: str) -> dict[str, Start]:
    """All runs of one seed, one after the other."""
    text = f"{model} --num-layers {depth} {TRAINING} --train-iters {steps} --seed {seed} {data_flags(data)}"
    first = start_run(text)
    starts = {
        name: first_steps(add_run(first, f"{text} {flags}") if flags else first, steps)
        for name, flags in STARTS.items()
    }
    end_runs()
    return starts


def data_flags(data: Path) -> str:
    """The flags that name shards and tokenizer."""
    shards = f"--data-path {data / 'stdlib_text_document'} --split 90,10,0 --data-cache-path {data / 'cache'}"
    return f"{shards} {' '.join(stdlib_text.tokenizer_flags(data))}"


def first_steps(run: Run, steps: int) -> Start:
    """Train as the training loop does."""
    if needs_calibration(run):
        calibrate(run, Progress())
    batches = build_batches(run, run.datasets[0], 0, steps * run.global_batch_size, num_workers=0)
    losses = [train_step(run, batches, Progress()).loss]
    gradient = torch.cat(
        [parameter.main_grad.flatten().float() for parameter in run.training_state.chunks[0].parameters()]
    )
    losses += [train_step(run, batches, Progress(step)).loss for step in range(1, steps)]
    return Start(gradient, tuple(losses))


def gradient_errors(starts: Mapping[str, Start]) -> dict[str, float]:
    """How far the first gradient of each run is from the baseline's, relative to its length."""
    exact = starts[BASELINE].gradient
    return {name: float((start.gradient - exact).norm() / exact.norm()) for name, start in starts.items()}


def loss_distances(by_seed: Sequence[Mapping[str, Start]]) -> dict[str, list[float]]:
    """Root mean square over the seeds of each step's difference to the baseline, in nats."""
    losses = {name: torch.tensor([starts[name].losses for starts in by_seed], dtype=torch.float64) for name in STARTS}
    return {name: (each - losses[BASELINE]).square().mean(0).sqrt().tolist() for name, each in losses.items()}


def mean_errors(by_seed: Sequence[Mapping[str, Start]]) -> dict[str, float]:
    """Mean of the gradients' errors over the seeds."""
    errors = [gradient_errors(starts) for starts in by_seed]
    return {name: sum(each[name] for each in errors) / len(errors) for name in STARTS}


# --- the result -------------------------------------------------------------------------------------------------------


def root_mean_square(values: Sequence[float]) -> float:
    """Of some numbers."""
    return (sum(value**2 for value in values) / len(values)) ** 0.5


def tables(errors: Mapping[int, Mapping[str, float]], distances: Mapping[str, Sequence[float]]) -> str:
    """Both measures in Markdown."""
    names = [name for name in STARTS if name != BASELINE]
    steps = len(distances[BASELINE])
    edges = sorted({0, min(3, steps), min(10, steps), steps})
    spans = list(zip(edges[:-1], edges[1:], strict=True))
    header = ("start", *(f"first gradient, {depth} layers" for depth in errors),
              *(f"losses, steps {low + 1} to {high}" for low, high in spans))  # fmt: skip
    rows = [
        (
            name,
            *(f"{errors[depth][name]:.1%}" for depth in errors),
            *(f"{root_mean_square(distances[name][low:high]):.5f}" for low, high in spans),
        )
        for name in names
    ]
    return timing.format_table(header, rows)


def plot(errors: Mapping[int, Mapping[str, float]], distances: Mapping[str, Sequence[float]], path: Path) -> None:
    """A picture: bars for the first gradient, curves for the losses."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained", facecolor="white")
    bars, curves = figure.subplots(1, 2, width_ratios=(1, 1.3))
    for index, (name, color) in enumerate(COLORS.items()):
        bars.bar([x + 0.27 * (index - 1) for x in range(len(errors))], [each[name] for each in errors.values()], 0.25,
                 color=color, label=name)  # fmt: skip
        thousandths = [1000 * distance for distance in distances[name]]
        curves.plot(range(1, len(thousandths) + 1), thousandths, color=color, label=name, linewidth=2)
    bars.set_xticks(range(len(errors)), [f"{depth} layers" for depth in errors])
    bars.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    bars.set_title("first gradient: error to BF16's", loc="left", fontsize=11)
    bars.legend(frameon=False)
    curves.set_ylim(bottom=0)
    curves.set_xlabel("step")
    curves.set_title("training loss: difference to BF16's, thousandths of a nat", loc="left", fontsize=11)
    for axes in (bars, curves):
        axes.grid(True, axis="y", color="#e9ecef")
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="default 1 2 3")
    parser.add_argument("--steps", type=int, default=40, help="steps of the loss curves (default 40)")
    parser.add_argument("--depths", nargs="+", type=int, default=[2, 8, 16],
                        help="layers for the first gradient; loss curves: the second (default 2 8 16)")  # fmt: skip
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "delayed_start",
                        help="text and tokenizer (default runs/delayed_start)")  # fmt: skip
    parser.add_argument("--model", default=stdlib_text.MODEL, help="flags of the model")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--plot", type=Path, help="also draw them into this file")
    options = parser.parse_args(argv)

    data = options.folder.resolve() / "data"
    stdlib_text.prepare_data(data)
    shown = options.depths[min(1, len(options.depths) - 1)]
    by_depth = {
        depth: [starts_of(seed, depth, options.steps if depth == shown else 1, data, options.model)
                for seed in options.seeds]
        for depth in options.depths
    }  # fmt: skip
    errors = {depth: mean_errors(by_seed) for depth, by_seed in by_depth.items()}
    distances = loss_distances(by_depth[shown])
    print(tables(errors, distances))
    if options.json:
        timing.write_json(options.json, {"options": vars(options), "errors": errors, "distances": distances})
    if options.plot:
        plot(errors, distances, options.plot)


if __name__ == "__main__":
    main()
