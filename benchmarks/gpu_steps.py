"""Step times of several settings on one GPU: quick ratios, and a profile of a step.

    python benchmarks/gpu_steps.py --shape A --rounds 2 --modes \\
        "peer=@delayed" "delayed=delayed --use-transformer-engine-op-fuser" [--profile delayed] [--json FILE]

A mode is NAME=RECIPE FLAGS..., with a recipe of `gpu_train.py`, or NAME=@RECIPE SETTINGS...: a bare megatron-core loop
with its fastest settings (`megatron_loop.py`) but those named. Without NAME= its flags are its name. Every round builds
every mode, in alternating order. A mode runs warmup steps and then `--steps` steps, timed together between two
synchronizations. All batches are made before the first step: times are of training alone, as in a program whose loader
processes keep up. Each build is a separate process, forked from one that has imported everything but not touched the
GPU: it starts immediately, and cannot affect later modes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# torch asks the driver whether there is a GPU, instead of starting to use it, after which it could not be forked.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

from benchmarks import timing
from benchmarks.gpu_profile import PROFILED_STEPS, profiled
from benchmarks.gpu_train import COMMON, MODES, SHAPES
from megafp8.analysis.profile_report import profile_text
from megafp8.config import flags
from megafp8.config.schema.model import ParallelConfig
from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.checkpoint.progress import Progress
from megafp8.device.cuda_libraries import cuda_library_versions
from megafp8.device.energy import EnergyCounter, has_library
from megafp8.device.platform import detect_platform, init_distributed
from megafp8.training.checks import ValidatedRun, check
from megafp8.training.evaluation import build_batches
from megafp8.training.setup import build_training_run
from megafp8.training.step import StepResult, train_step

PROCESS_S = 120.0


class Failed(Exception):
    """A process did not give what it should."""


@dataclass(frozen=True)
class Timed:
    """What one build of a mode measured.

    Attributes:
        step_ms: mean of the timed steps.
        joules_per_step: mean of the timed steps, by the driver's counter; None without the driver's library.
        losses: of all its steps.
        attention: the kernels that Transformer Engine took.
    """

    mode: str
    round: int
    step_ms: float
    peak_gib: float
    losses: list[float]
    attention: str
    device: str
    joules_per_step: Optional[float]


def check_mode(options: argparse.Namespace, text: str) -> ValidatedRun:
    """A mode of megafp8, checked: RECIPE FLAGS on the shape, loader in this process."""
    return check_flags(f"{SHAPES[options.shape]} {COMMON} {flags_of_mode(text)} {options.extra}")


def flags_of_mode(text: str) -> str:
    """The flags that RECIPE FLAGS stands for."""
    recipe, _, extra = text.partition(" ")
    many_steps = "--train-iters 1000 --log-interval 100"  # COMMON is for programs of few
    return f"{many_steps} {MODES[recipe]} {extra}"


def check_flags(text: str) -> ValidatedRun:
    """A command line, checked; the loader is in this process."""
    return check(*flags.parse_with_problems([*shlex.split(text), "--num-workers", "0"]))


def trainer(validated: ValidatedRun, num_steps: int) -> Callable[[int], StepResult]:
    """A function that trains step i, on batches of `num_steps` that exist already. torch.distributed runs already."""
    run = build_training_run(validated.invocation.config, detect_platform(), validated.implementation)
    loader = build_batches(run, run.datasets[0], 0, num_steps * run.global_batch_size, num_workers=0)
    batches = None if loader is None else iter(list(loader))  # made in a step, they would be part of its time
    return lambda step: train_step(run, batches, Progress(step - 1))


def megafp8_steps(options: argparse.Namespace, text: str, is_told: bool) -> Callable[[int], float]:
    """A function that trains step i and returns its loss, and, if told, what a run would say of its settings."""
    validated = check_mode(options, text)
    for warning in validated.warnings if is_told else ():
        print(f"{text}: {warning}", flush=True)
    train = trainer(validated, options.warm_up + options.steps + PROFILED_STEPS)
    return lambda step: train(step).loss


def peer_steps(options: argparse.Namespace, text: str) -> Callable[[int], float]:
    """The same of megatron-core alone: RECIPE, and settings that are turned off."""
    from benchmarks.megatron_loop import PeerLoop

    recipe, *turned_off = text.split()
    return PeerLoop(options.shape, recipe, turned_off=turned_off).step


def measure(options: argparse.Namespace, name: str, text: str, number: int) -> Timed:
    """Build a mode and train."""
    init_distributed(detect_platform(), ParallelConfig())
    step = peer_steps(options, text[1:]) if text.startswith("@") else megafp8_steps(options, text, number == 0)
    losses = [step(index) for index in range(1, options.warm_up + 1)]
    joules = EnergyCounter(torch.device("cuda")).joules if has_library() else None
    torch.cuda.synchronize()
    started, joules_before = time.perf_counter(), joules() if joules else 0.0
    losses += [step(options.warm_up + index) for index in range(1, options.steps + 1)]
    torch.cuda.synchronize()
    step_ms = (time.perf_counter() - started) * 1e3 / options.steps
    joules_per_step = (joules() - joules_before) / options.steps if joules else None
    peak_gib = torch.cuda.max_memory_allocated() / 2**30
    if number == 0 and name in options.profile:
        groups = profiled(lambda: step(options.warm_up + options.steps + 1), options.trace)
        print(f"\n{name}\n" + profile_text(groups, {}), flush=True)
    return Timed(
        name, number, step_ms, peak_gib, losses, attention_of_process(), torch.cuda.get_device_name(), joules_per_step
    )


def attention_of_process() -> str:
    """What Transformer Engine took in the last step, if it has attention."""
    from megafp8.te.layers import selected_attention_backend

    return selected_attention_backend() or "not Transformer Engine's"


def in_process(method: str, function: Callable[..., Any], *args: Any, limit_s: float = PROCESS_S) -> Any:
    """What a function returns in a process of its own.

    Raises:
        Failed: with the process's traceback, or when it ended or took `limit_s` without an answer.
    """
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(sender, function, *args))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            raise Failed(f"no answer within {limit_s} s")
        result = receiver.recv()
    except EOFError as error:
        process.join()
        raise Failed(f"the process ended with {process.exitcode}") from error
    finally:
        process.kill()
        process.join()
    if isinstance(result, str):
        raise Failed(result)
    return result


def answer(sender: Any, function: Callable[..., Any], *args: Any) -> None:
    """In the process: send what the function returns, or its traceback as text."""
    try:
        sender.send(function(*args))
    except Exception:  # noqa: BLE001 - the other modes are still of interest
        sender.send(traceback.format_exc())


def import_everything() -> None:
    """What a build would import otherwise, each time anew."""
    from benchmarks import megatron_loop  # noqa: F401
    from megafp8.kernels import adam  # noqa: F401
    from megafp8.te import layers  # noqa: F401


def touch_gpu() -> float:
    """Fails in a process that was forked after the GPU was used."""
    return torch.zeros(1, device="cuda").item()


def start_method() -> str:
    """Fork if that works on this machine; else start anew, which takes the time of all imports for each build."""
    try:
        in_process("fork", touch_gpu)
    except Failed:
        return "spawn"
    return "fork"


def rows_of(done: Sequence[Timed], first: str) -> list[dict[str, Any]]:
    """A row a mode: medians, and the speed against the first mode within each round."""
    base = {timed.round: timed.step_ms for timed in done if timed.mode == first}
    rows = []
    for name in dict.fromkeys(timed.mode for timed in done):
        mine = [timed for timed in done if timed.mode == name]
        pairs = [(base[timed.round], timed.step_ms) for timed in mine if timed.round in base]
        rows.append({
            "mode": name,
            "step_ms": statistics.median(timed.step_ms for timed in mine),
            "to_first": timing.ratio_of(*zip(*pairs, strict=True)) if pairs else None,
            "peak_gib": max(timed.peak_gib for timed in mine),
            "losses": mine[0].losses,
            "attention": " / ".join(dict.fromkeys(timed.attention for timed in mine)),
        })  # fmt: skip
    return rows


def named(mode: str) -> tuple[str, str]:
    """Name and flags of a mode; without NAME= its flags are its name."""
    name, separator, flags = mode.partition("=")
    return (name, flags) if separator and " " not in name else (mode, mode)


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="A", help="model and batch")
    parser.add_argument("--modes", nargs="+", required=True, help="[NAME=]RECIPE FLAGS, or [NAME=]@RECIPE SETTINGS")
    parser.add_argument("--rounds", type=int, default=2, help="builds of each mode")
    parser.add_argument("--once", nargs="*", default=[], help="modes that are built in the first round only")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--extra", default="", help="more flags for every mode of megafp8")
    parser.add_argument("--profile", nargs="*", default=[], help="modes to profile a step of")
    parser.add_argument("--trace", type=Path, help="folder for the profiles' kernels as text")
    parser.add_argument("--build-s", type=float, default=PROCESS_S, help="seconds after which a build is killed")
    parser.add_argument("--minutes", type=float, default=60.0, help="no mode is started after so long")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit status 1 if a mode failed."""
    options = parse(argv)
    modes = dict(map(named, options.modes))
    deadline = time.monotonic() + 60 * options.minutes
    import_everything()
    method = start_method()
    print(f"each build is a process: {method}", flush=True)
    versions = in_process(method, cuda_library_versions)  # here it would keep later builds from being forked
    done: list[Timed] = []
    failures: dict[str, str] = {}
    for number in range(options.rounds):
        names = [name for name in modes if name not in failures and not (number and name in options.once)]
        for name in names if number % 2 == 0 else reversed(names):
            if time.monotonic() > deadline:
                failures["time"] = f"stopped before {name} in round {number + 1}"
                break
            began = time.monotonic()
            try:
                timed = in_process(method, measure, options, name, modes[name], number, limit_s=options.build_s)
                done.append(timed)
                print(
                    f"round {number + 1} {name}: {timed.step_ms:.1f} ms, {timed.peak_gib:.1f} GiB, "
                    f"loss {timed.losses[-1]:.4f}, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
            except Failed as error:
                failures[name] = str(error)
                print(f"{name} failed:\n{failures[name]}", flush=True)
            if options.json:
                result = {"cuda_versions": versions, "options": vars(options), "done": done, "failures": failures}
                timing.write_json(options.json, result)
    rows = rows_of(done, next(iter(modes)))
    header = ("mode", "step ms", f"speed to {next(iter(modes))} [range]", "peak GiB", "losses", "attention")
    cells = [
        (row["mode"], row["step_ms"], row["to_first"], row["peak_gib"],
         " ".join(f"{loss:.3f}" for loss in row["losses"][:: max(1, len(row["losses"]) // 4)]), row["attention"])
        for row in rows
    ]  # fmt: skip
    print(timing.format_table(header, cells))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
