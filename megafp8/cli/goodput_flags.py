"""The flags of `megafp8 plan --goodput`, and the inputs of its simulation."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

from megafp8.errors import ConfigError
from megafp8.planning import goodput_inputs as goodput
from megafp8.planning.goodput_inputs import GB, RANGES, UNITS_S, GoodputInputs, range_problem

if TYPE_CHECKING:
    from megafp8.config.flags import ParsedArgs
    from megafp8.device.gpus import Gpu

FLAGS: dict[str, tuple[str, str]] = {
    "days": ("D", "duration of the run (default: 60)"),
    "step_s": ("S", "duration of a step; default: the planner's prediction for the model"),
    "tokens_per_step": ("N", "tokens of a step; default: the model's global batch"),
    "gpu_failures_per_s": ("X", "failures of one GPU in 1,000 days (default: 0.303, Llama 3 405B)"),
    "node_failures_per_s": (
        "X", "other failures of one node in 1,000 days: host, network, software (default: 1.37, Llama 3 405B)",
    ),
    "failures_per_burst": ("N", "mean number of failures in a burst (default: 1, independent failures)"),
    "burst_gap_s": ("S", "mean time between the failures of a burst (default: 600)"),
    "hang_fraction": ("F", "share of failures that only a timeout detects (default: 0.017, Llama 3 405B)"),
    "hardware_fraction": ("F", "share of failures after which a node is replaced (default: 0.78, Llama 3 405B)"),
    "detection_s": (
        "S", "from a crash to the end of all ranks, with diagnosis (default: 0, as the default of --restart-s has it)",
    ),
    "hang_detection_s": ("S", "the same for a hang; default: --step-timeout-s, or what a run has without it"),
    "restart_s": ("S", "from then to the first step, without the load (default: 17, measured on two CPU ranks)"),
    "spare_nodes": ("N", "nodes that can replace others; default: one is always available"),
    "repair_s": ("H", "hours until a replaced node is a spare (default: 24)"),
    "maintenance_interval_s": ("D", "days between planned interruptions; default: there are none"),
    "maintenance_s": ("M", "duration of one, without the restart (default: 0)"),
    "stragglers_per_s": ("X", "how often nodes become slow, per 1,000 node-days (default: 0)"),
    "straggler_slowdown": ("F", "duration of a step with a slow node, relative to one without (default: 1.2)"),
    "straggler_s": ("H", "mean hours until a slow node is fast again (default: 1)"),
    "replicas": ("N", "simulated runs (default: 99)"),
    "seed": ("N", "seed of the simulation (default: 1)"),
}  # fmt: skip
"""Metavariable and help of each input with a flag; the flags are those of `RANGES`."""
COUNTS = ("spare_nodes", "replicas", "seed")

STORAGE_FLAGS = {
    "--checkpoint-gb": ("X", "size of a checkpoint; default: the model's weights, master weights and moments"),
    "--node-storage-gb-per-s": ("X", "storage bandwidth of one node (default: 1.3, measured on one local disk)"),
    "--storage-gb-per-s": ("X", "storage bandwidth of all nodes together (default: 2,000, Llama 3 405B)"),
    "--save-stall-s": ("S", "how long --async-save stops training (default: 0.142 of the save, measured on a CPU)"),
}
STORAGE_RANGES = {
    "--checkpoint-gb": (1e-6, 1e9), "--node-storage-gb-per-s": (1e-3, 1e6), "--storage-gb-per-s": (1e-3, 1e9),
    "--save-stall-s": (0, 1e6),
}  # fmt: skip


@dataclass(frozen=True)
class GoodputRequest:
    """What is simulated.

    Attributes:
        sources: where step time and checkpoint size come from.
    """

    inputs: GoodputInputs
    sources: list[str]


def add_goodput_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--goodput` and its flags. All have the default None, so that one without `--goodput` is noticed."""
    group = parser.add_argument_group(
        "goodput", "simulate the run with failures, saves and restarts (docs/goodput.md). Of the run's own flags, "
        "--save-interval, --async-save and --step-timeout-s are used"
    )  # fmt: skip
    group.add_argument("--goodput", action="store_true", help="effective training time, tokens per day, save interval")
    for name, (metavar, text) in FLAGS.items():
        kind = int if name in COUNTS else float
        group.add_argument(RANGES[name][0], dest=_dest(name), type=kind, metavar=metavar, help=text)
    for flag, (metavar, text) in STORAGE_FLAGS.items():
        group.add_argument(flag, type=float, metavar=metavar, help=text)
    group.add_argument(
        "--no-failures-while-down", action="store_true", default=None, help="failures strike only while the run trains"
    )


def _dest(name: str) -> str:
    return f"goodput_{name}"


def _storage(arguments: argparse.Namespace, flag: str) -> Optional[float]:
    value: Optional[float] = getattr(arguments, flag[2:].replace("-", "_"))
    return value


def goodput_problems(arguments: argparse.Namespace) -> Iterator[str]:
    """Flags of the goodput group that are out of range or without effect."""
    if not arguments.goodput:
        values = {RANGES[name][0]: getattr(arguments, _dest(name)) for name in FLAGS}
        values |= {flag: _storage(arguments, flag) for flag in STORAGE_FLAGS}
        values["--no-failures-while-down"] = arguments.no_failures_while_down
        given = [flag for flag, value in values.items() if value is not None]
        if given:
            yield f"{', '.join(given)}: only with --goodput: add it, or remove the others"
        return
    if arguments.scaling is not None:
        yield "--scaling: not with --goodput, which simulates one number of GPUs: remove one of them"
    if arguments.top is not None:
        yield "--top: not with --goodput, which uses the fastest layout: remove one of them"
    for name, given_value in given_inputs(arguments).items():
        yield from range_problem(name, given_value)
    for flag, (low, high) in STORAGE_RANGES.items():
        value = _storage(arguments, flag)
        if value is not None and not low <= value <= high:
            yield f"{flag} {value:g}: must be {goodput.between(low, high)}"


def build_request(arguments: argparse.Namespace, parsed: ParsedArgs, gpu: Gpu) -> GoodputRequest:
    """The inputs of the simulation, with the planner's prediction for what is not given.

    Raises:
        ConfigError: neither a model nor step time, tokens and checkpoint size are given, nothing fits, or flags
            contradict each other.
    """
    from megafp8.config.rules.declared import numbers_are_in_range

    if problems := list(numbers_are_in_range(parsed.config, arguments.gpus)):
        raise ConfigError(problems)
    values = given_inputs(arguments)
    size_gb = arguments.checkpoint_gb
    step_origin = "given"
    size_origin = "its size was given" if size_gb is not None else "weights, master weights and moments"
    if size_gb is None or "step_s" not in values or "tokens_per_step" not in values:
        if parsed.config.model.num_layers is None:
            raise ConfigError(
                "--goodput: neither a model nor the figures of one: give --model-preset or another model, or all of "
                "--step-s, --tokens-per-step and --checkpoint-gb"
            )
        layout, step_s, tokens, predicted_bytes = predict(parsed, gpu, arguments.gpus)
        if "step_s" not in values:
            step_origin = f"predicted for {layout}"
        values = {"step_s": step_s, "tokens_per_step": tokens} | values
        size_gb = predicted_bytes / GB if size_gb is None else size_gb
    num_nodes = math.ceil(arguments.gpus / gpu.gpus_per_node)
    bytes_per_s = storage_bytes_per_s(arguments, num_nodes)
    checkpoint, training = parsed.config.checkpoint, parsed.config.training
    write_s = size_gb * GB / bytes_per_s
    if "hang_detection_s" not in values:
        timeout_s = training.step_timeout_s
        if timeout_s is None:
            timeout_s = max(goodput.HANG_TIMEOUT_STEPS * values["step_s"], goodput.MIN_HANG_TIMEOUT_S)
        # Without a step timeout, that of collectives ends a hang.
        values["hang_detection_s"] = timeout_s or 60.0 * parsed.config.parallel.distributed_timeout_minutes
    inputs = GoodputInputs(
        **values, num_gpus=arguments.gpus, num_nodes=num_nodes,
        save_interval=checkpoint.save_interval, load_s=write_s, write_s=write_s,
        stall_s=stall_s(arguments, checkpoint.async_save, write_s),
        fails_while_down=not arguments.no_failures_while_down,
    )  # fmt: skip
    sources = [
        f"a step of {inputs.tokens_per_step:,.0f} tokens takes {inputs.step_s:.4g} s ({step_origin})",
        f"a checkpoint of {size_gb:,.4g} GB ({size_origin}) is written and read at {bytes_per_s / GB:,.4g} GB/s",
    ]
    return GoodputRequest(inputs, sources)


def given_inputs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Values of the inputs with flags, in the units of `GoodputInputs`."""
    values = {name: getattr(arguments, _dest(name)) for name in FLAGS}
    factors = {name: UNITS_S.get(RANGES[name][0], 1) for name in FLAGS}
    return {
        name: value if factors[name] == 1 else value / factors[name]
        for name, value in values.items() if value is not None
    }  # fmt: skip


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
