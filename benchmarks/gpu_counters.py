"""Cost of the counters of non-finite and saturated operands on a GPU: kernel time of steps with and without them.

    python benchmarks/gpu_counters.py --shape A \\
        --extra="--cuda-graph-impl none --micro-batch-size 4 --global-batch-size 4"

A mode is RECIPE FLAGS. Each build is a process (`gpu_steps.py`), in the order without, with, with, without. Kernels are
summed by torch's profiler over `--steps` steps: what the host and other programs do does not count. GEMMs and attention
are left out of the difference: counters do not change them, and their times differ by 0.5% between two builds, which is
more than the bar of 0.3% of the step.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_profile, gpu_steps  # (first: it sets how torch looks for GPUs)

import torch  # isort: skip

from benchmarks.gpu_train import SHAPES
from megafp8.config.schema.model import ParallelConfig
from megafp8.device.platform import detect_platform, init_distributed
from megafp8.nonfinite.operands import OperandMonitor
from megafp8.training import step_parts

MODES = ("delayed", "tensorwise", "tensorwise --quantize-kernels te")
ORDER = (False, True, True, False)
UNCHANGED = ("GEMM FP8", "GEMM BF16", "attention")  # groups of kernels


@dataclass(frozen=True)
class Kernels:
    """Of a step: milliseconds of all, and of those that counters could change, and their number."""

    all_ms: float
    others_ms: float
    count: float


def mean_of(builds: Sequence[Kernels]) -> Kernels:
    """The mean of several builds."""
    return Kernels(*(mean(values) for values in zip(*map(dataclasses.astuple, builds), strict=True)))


def kernels_of(options: argparse.Namespace, mode: str, has_counters: bool) -> Kernels:
    """The kernels of a step, in a process of its own."""
    from megafp8.te import patches  # needs Transformer Engine

    if not has_counters:
        step_parts.build_operand_monitor = lambda *_: OperandMonitor()
        patches.observe_amaxes(lambda forward: None)
    init_distributed(detect_platform(), ParallelConfig())
    train = gpu_steps.trainer(gpu_steps.check_mode(options, mode), options.warm_up + options.steps)
    for step in range(1, options.warm_up + 1):
        train(step)
    torch.cuda.synchronize()
    steps = itertools.count(options.warm_up + 1)
    rows = gpu_profile.profiled(lambda: train(next(steps)), steps=options.steps).rows()
    others = sum(ms for group, ms, _ in rows if group not in UNCHANGED)
    return Kernels(sum(ms for _, ms, _ in rows), others, sum(count for _, _, count in rows))


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit status 1 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="A", help="model and batch")
    parser.add_argument("--modes", nargs="+", default=list(MODES), help='RECIPE, or "RECIPE FLAGS"')
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the counted ones")
    parser.add_argument("--steps", type=int, default=5, help="counted steps")
    parser.add_argument("--extra", default="", help='more flags for every mode: --extra="--flag value"')
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU, whose kernels this benchmark sums; counter_overhead.py is for CPUs", file=sys.stderr)
        return 1
    gpu_steps.import_everything()
    method = gpu_steps.start_method()
    for mode in options.modes:
        found: dict[bool, list[Kernels]] = {False: [], True: []}
        for has_counters in ORDER:
            found[has_counters].append(gpu_steps.in_process(method, kernels_of, options, mode, has_counters))
        before, after = mean_of(found[False]), mean_of(found[True])
        print(
            f"{mode}: {before.all_ms:.3f} ms in {before.count:.0f} kernels without counters, {after.all_ms:.3f} ms in "
            f"{after.count:.0f} with; but for GEMMs and attention {before.others_ms:.3f} and {after.others_ms:.3f} ms: "
            f"{(after.others_ms - before.others_ms) / before.all_ms:+.3%} of a step",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
