"""The flags of `megafp8 goodput`, also of `megafp8 plan --goodput`, and the inputs of its formulas."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Optional

from megafp8.cli.common import given_flags
from megafp8.errors import ConfigError
from megafp8.planning import goodput
from megafp8.planning.goodput import DAY_S, GB, GoodputInputs

if TYPE_CHECKING:
    from megafp8.config.flags import ParsedArgs
    from megafp8.device.gpus import Gpu

FLAGS = {
    "--days": ("D", "duration of the run in days (default: 60)"),
    "--step-s": ("S", "duration of a step in seconds (default: the planner's prediction for the model)"),
    "--tokens-per-step": ("N", "tokens of a step (default: the model's global batch)"),
    "--gpu-failures-per-1000-days": ("X", "failures of one GPU in 1,000 days (default: 0.303, Llama 3 405B)"),
    "--node-failures-per-1000-days": (
        "X", "other failures of one node in 1,000 days: host, network, software (default: 1.37, Llama 3 405B)",
    ),
    "--detection-s": (
        "S", "mean time from a failure to the end of all ranks, with diagnosis (default: 0, as the default of "
        "--restart-s has it)",
    ),
    "--restart-s": ("S", "from then to the first step, without the load (default: 17, measured on two CPU ranks)"),
    "--checkpoint-gb": ("X", "size of a checkpoint (default: the model's weights, master weights and moments)"),
    "--node-storage-gb-per-s": ("X", "storage bandwidth of one node (default: 1.3, measured on one local disk)"),
    "--storage-gb-per-s": ("X", "storage bandwidth of all nodes together (default: 2,000, Llama 3 405B)"),
    "--save-stall-s": ("S", "how long --async-save stops training (default: 0.142 of the save, measured on a CPU)"),
}  # fmt: skip
"""Metavariable and help of the flags of `goodput.RANGES`."""
# Flags of the simulation that the formulas replaced, and what to give.
REFUSED_FLAGS = {
    **dict.fromkeys(("--replicas", "--simulation-seed"), "nothing is random any more: leave it out"),
    **dict.fromkeys(("--failures-per-burst", "--burst-gap-s"), "count a burst as one failure in the two rates"),
    **dict.fromkeys(("--hang-fraction", "--hang-detection-s"), "give the mean of crashes and hangs as --detection-s"),
    **dict.fromkeys(
        ("--hardware-fraction", "--spare-nodes", "--repair-hours"), "add the mean wait for a node to --restart-s"
    ),
    **dict.fromkeys(("--maintenance-interval-days", "--maintenance-minutes"), "take planned hours off --days"),
    **dict.fromkeys(
        ("--stragglers-per-1000-node-days", "--straggler-slowdown", "--straggler-hours"),
        "give the mean duration of a step as --step-s",
    ),
    "--no-failures-while-down": "failures also strike while the run is down: leave it out",
}


def add_goodput_flags(parser: argparse.ArgumentParser, is_shown: bool) -> None:
    """Add `--goodput` and its flags. All have the default None, so that one without `--goodput` is noticed.

    Args:
        is_shown: whether `--help` has them. It never has --goodput and the refused ones.
    """
    parser.add_argument("--goodput", action="store_true", help=argparse.SUPPRESS)
    for flag, (metavar, text) in FLAGS.items():
        parser.add_argument(flag, type=float, metavar=metavar, help=text if is_shown else argparse.SUPPRESS)
    for flag in REFUSED_FLAGS:
        parser.add_argument(flag, nargs="*", help=argparse.SUPPRESS)


def goodput_problems(arguments: argparse.Namespace) -> Iterator[str]:
    """Flags of the goodput group that are refused, out of range or without effect."""

    def values(*flags: str) -> dict[str, Any]:
        found = {flag: getattr(arguments, flag[2:].replace("-", "_")) for flag in flags}
        return {flag: value for flag, value in found.items() if value is not None}

    yield from (f"{flag}: {REFUSED_FLAGS[flag]}" for flag in values(*REFUSED_FLAGS))
    given = values(*FLAGS)
    if not arguments.goodput:
        if given:
            yield f"{', '.join(given)}: only with --goodput: add it, or remove the others"
        return
    for flag in values("--scaling", "--top", "--plot"):
        yield f"{flag}: not with --goodput, which has one number of GPUs, the fastest layout and no picture: remove one"
    for flag, value in given.items():
        low, high = goodput.RANGES[flag]
        if not low <= value <= high:  # NaN is not either
            yield f"{flag} {value:g}: must be between {low:,g} and {high:,.0f}"


def build_inputs(arguments: argparse.Namespace, parsed: ParsedArgs, gpu: Gpu) -> tuple[GoodputInputs, list[str]]:
    """The inputs of the formulas, with the planner's prediction for what is not given, and where they come from.

    Raises:
        ConfigError: neither a model nor step time, tokens and checkpoint size are given, nothing fits, or flags
            contradict each other.
    """
    from megafp8.config.rules.declared import numbers_are_in_range

    if problems := list(numbers_are_in_range(parsed.config, arguments.gpus)):
        raise ConfigError(problems)
    values = given_flags(arguments, ("days", "step_s", "tokens_per_step", "detection_s", "restart_s"))
    rates = given_flags(arguments, ("gpu_failures_per_1000_days", "node_failures_per_1000_days"))
    values |= {name.replace("1000_days", "s"): rate / 1000 / DAY_S for name, rate in rates.items()}
    size_gb = arguments.checkpoint_gb
    step_origin = "given"
    size_origin = "its size was given" if size_gb is not None else "weights, master weights and moments"
    if size_gb is None or "step_s" not in values or "tokens_per_step" not in values:
        if parsed.config.model.num_layers is None:
            raise ConfigError(
                "neither a model nor the figures of one: give --model-preset or another model, or all of "
                "--step-s, --tokens-per-step and --checkpoint-gb"
            )
        layout, step_s, tokens, predicted_bytes = predict(parsed, gpu, arguments.gpus)
        if "step_s" not in values:
            step_origin = f"predicted for {layout}"
        values = {"step_s": step_s, "tokens_per_step": tokens} | values
        size_gb = predicted_bytes / GB if size_gb is None else size_gb
    num_nodes = math.ceil(arguments.gpus / gpu.gpus_per_node)
    bytes_per_s = storage_bytes_per_s(arguments, num_nodes)
    write_s = size_gb * GB / bytes_per_s
    inputs = GoodputInputs(
        **values, num_gpus=arguments.gpus, num_nodes=num_nodes, save_interval=parsed.config.checkpoint.save_interval,
        load_s=write_s, write_s=write_s, stall_s=stall_s(arguments, parsed.config.checkpoint.async_save, write_s),
    )  # fmt: skip
    restart = [] if "restart_s" in values else ["the restart time was measured on two CPU ranks: give --restart-s"]
    return inputs, [
        f"a step of {inputs.tokens_per_step:,.0f} tokens takes {inputs.step_s:.4g} s ({step_origin})",
        f"a checkpoint of {size_gb:,.4g} GB ({size_origin}) is written and read at {bytes_per_s / GB:,.4g} GB/s",
        *restart,
    ]


def predict(parsed: ParsedArgs, gpu: Gpu, num_gpus: int) -> tuple[str, float, float, int]:
    """Name, step time, tokens per step and checkpoint size of the planner's fastest layout.

    Raises:
        ConfigError: no layout is legal or fits.
    """
    from megafp8.config.checkpoint_size import min_checkpoint_bytes
    from megafp8.planning.plan import make_plan

    plan = make_plan(parsed, gpu, num_gpus, ())
    if not plan.search.layouts:
        raise ConfigError([
            f"--gpus {num_gpus:,}: no layout of the model fits in the memory of an {gpu.name}: give another number of "
            "GPUs or another layout, or --step-s, --tokens-per-step and --checkpoint-gb", *plan.warnings,
        ])  # fmt: skip
    best = plan.search.layouts[0]
    num_bytes = min_checkpoint_bytes(best.run.config, best.run.padded_vocab)
    return best.name, best.step.seconds, float(best.step.tokens), num_bytes


def storage_bytes_per_s(arguments: argparse.Namespace, num_nodes: int) -> float:
    """What all nodes write or read together."""
    node, total = arguments.node_storage_gb_per_s, arguments.storage_gb_per_s
    node_bytes_per_s = goodput.NODE_STORAGE_BYTES_PER_S if node is None else node * GB
    total_bytes_per_s = goodput.LLAMA_STORAGE_BYTES_PER_S if total is None else total * GB
    return float(min(num_nodes * node_bytes_per_s, total_bytes_per_s))


def stall_s(arguments: argparse.Namespace, is_async: bool, write_s: float) -> float:
    """How long a save stops training.

    Raises:
        ConfigError: --save-stall-s does not fit.
    """
    given: Optional[float] = arguments.save_stall_s
    if given is None:
        return goodput.ASYNC_STALL_FRACTION * write_s if is_async else write_s
    if not is_async:
        raise ConfigError(
            f"--save-stall-s {given:g}: a synchronous save stops training until it is complete: add --async-save"
        )
    if given > write_s:
        raise ConfigError(
            f"--save-stall-s {given:g}: longer than the complete save, {write_s:.3g} s: give at most that, or less "
            "storage bandwidth"
        )
    return given
