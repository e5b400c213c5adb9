"""Find the fastest layouts of a model on a number of GPUs, their memory, and what limits their speed.

    megafp8 plan --model-preset llama3-70b --gpus 512 --gpu h200 --recipe tensorwise
    megafp8 plan --model-preset llama3-8b --gpus 64 --gpu h100 --tensor-model-parallel-size 2 --plot plan.png

Accepts all flags of megafp8 pretrain as well. Tensor, pipeline (also interleaved), context and expert parallelism,
micro-batch size and recomputation are searched unless they are given. The output has memory, step time and traffic of
the fastest layouts, and the flags of the first one for megafp8 pretrain. Neither a GPU nor torch is needed.
docs/planning.md describes the model and its errors against measurements. For failures, saves and restarts see megafp8
goodput.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megafp8.analysis.plotting import picture_problems
from megafp8.cli.command_flags import add_flags, argument, float_flag, int_flag, path_flag, switch
from megafp8.cli.common import build_command_parser, returns_exit_status
from megafp8.cli.goodput_flags import add_goodput_flags, build_inputs, goodput_problems
from megafp8.config.gpu_names import COMPUTE_CAPABILITIES, gpu_type
from megafp8.errors import ConfigError

if TYPE_CHECKING:
    from megafp8.config.flags import ParsedArgs
    from megafp8.device.gpus import Gpu

MOST_GPUS = 2**20
LAYOUTS_SHOWN = 5
LEAST_GBIT_PER_S, MOST_GBIT_PER_S = 1, 100_000


def build_parser() -> argparse.ArgumentParser:
    parser = build_command_parser(__doc__, allow_abbrev=False)
    add_cluster_flags(parser)
    add_flags(
        parser,
        int_flag("--top", "number of layouts to show (default: 5)"),
        int_flag("--scaling", "numbers of GPUs to compare (default: powers of two from 8 to 16,384; no number: no "
                 "comparison)", nargs="*"),
        path_flag("--plot", "plot speed over numbers of GPUs, and the parts of memory and step time", metavar="PNG"),
    )  # fmt: skip
    add_goodput_flags(parser, is_shown=False)
    return parser


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the GPUs, and --json."""
    add_flags(
        parser,
        int_flag("--gpus", "GPUs to plan for", required=True),
        argument("--gpu", f"kind of GPU: {', '.join(COMPUTE_CAPABILITIES)} (default: h200)", type=gpu_type(),
                 default="h200", metavar="NAME"),
        float_flag("--gpu-memory-gib", "memory of a GPU like --gpu", metavar="GIB"),
        float_flag("--gpu-peak-tflops", "dense BF16 peak of a GPU like --gpu; others change in proportion",
                   metavar="X"),
        float_flag("--network-gbit-per-s", "network bandwidth per GPU (default: that of a typical node)", metavar="X"),
        switch("--json", "print JSON instead of text"),
    )  # fmt: skip


def number_problems(arguments: argparse.Namespace) -> Iterator[str]:
    """Flags with numbers out of range."""
    counts = {"--gpus": [arguments.gpus], "--scaling": arguments.scaling or []}
    for flag, numbers in counts.items():
        wrong = (number for number in numbers if not 1 <= number <= MOST_GPUS)
        yield from (f"{flag} {number}: must be between 1 and {MOST_GPUS:,}" for number in wrong)
    if arguments.top is not None and arguments.top < 1:
        yield f"--top {arguments.top}: must be at least 1"
    network = arguments.network_gbit_per_s
    if network is not None and not LEAST_GBIT_PER_S <= network <= MOST_GBIT_PER_S:  # NaN is not either
        yield f"--network-gbit-per-s {network:g}: must be between {LEAST_GBIT_PER_S} and {MOST_GBIT_PER_S:,}"
    for flag in ("gpu_memory_gib", "gpu_peak_tflops"):
        value = getattr(arguments, flag)
        if value is not None and not 0 < value < math.inf:
            yield f"--{flag.replace('_', '-')} {value:g}: must be above 0"
    yield from picture_problems("--plot", arguments.plot)
    yield from goodput_problems(arguments)


@returns_exit_status("plan")
def main(argv: Sequence[str]) -> int:
    """Print the plan; return 0, or 64 with wrong flags or when nothing fits."""
    return run(*build_parser().parse_known_args(argv))


def run(arguments: argparse.Namespace, training: Sequence[str]) -> int:
    """Print the plan or the goodput of a command line that is parsed."""
    from megafp8.config import flags
    from megafp8.device.gpus import GPUS, with_figures
    from megafp8.planning.plan import default_scaling, make_plan, with_network
    from megafp8.planning.report import plan_data, plan_text

    if problems := list(number_problems(arguments)):
        raise ConfigError(problems)
    like = with_figures(GPUS[arguments.gpu], arguments.gpu_memory_gib, arguments.gpu_peak_tflops)
    gpu = with_network(like, arguments.network_gbit_per_s)
    parsed = flags.parse(training)
    if arguments.goodput:
        return print_goodput(arguments, parsed, gpu)
    requested = default_scaling(parsed.config) if arguments.scaling is None else arguments.scaling
    counts = sorted({*requested, arguments.gpus}) if requested else ()
    plan = make_plan(parsed, gpu, arguments.gpus, counts)
    top = arguments.top or LAYOUTS_SHOWN
    print(json.dumps(plan_data(plan, top), indent=2) if arguments.json else plan_text(plan, top))
    if arguments.plot:
        from megafp8.analysis.plot_plan import plot_plan

        print(f"wrote {plot_plan(plan, arguments.plot)}", file=sys.stderr)
    return 0 if plan.search.layouts else ConfigError.exit_status


def print_goodput(arguments: argparse.Namespace, parsed: ParsedArgs, gpu: Gpu) -> int:
    """Print the goodput of the run; return 0.

    Raises:
        ConfigError: wrong flags, or nothing fits.
    """
    from megafp8.planning.goodput_report import goodput_data, goodput_text

    inputs, sources = build_inputs(arguments, parsed, gpu)
    data = goodput_data(inputs, gpu.name, sources)
    cluster = f"{inputs.num_gpus:,} x {gpu.name} ({inputs.num_nodes:,} nodes)"
    print(json.dumps(data, indent=2) if arguments.json else goodput_text(data, cluster))
    return 0
