"""Training speed on one GPU: `pretrain_gpt.py` in BF16 and with each FP8 recipe, and a bare megatron-core loop.

    python benchmarks/gpu_train.py [--shape A] [--modes bf16 tensorwise peer-delayed] [--rounds 2] [--json FILE]

One process per mode, in alternating order, since clocks and caches drift: ratios are computed within a round. The time
of a process is the median of its last steps, from records.jsonl; the result is the median over the rounds. Shape A:
llama-1b, 1.439e9 parameters, 8 sequences of 2048 tokens. Shape B: 8 layers of llama3-8b with a vocabulary of 50,304,
2.157e9 parameters, 2 sequences of 4096; B32k and B128k: one sequence. Shapes C and D: llama-1b with half the hidden
size, 1 and 8 sequences of 2048. The shapes with the names of models are these models, whole. TFLOP/s counts the model's
FLOPs (6 N + 6 L h s per token), not those of the hardware; joules for a token are the driver's. Weights are saved at
the end of each process, because records need `--save`, and then deleted. The `emulated-` modes run the same recipes on
the emulated layers, on any GPU. The `peer-` modes are a bare megatron-core loop with its fastest settings, timed by
`gpu_steps.py` between two synchronizations; `--extra` does not apply to them.

`--tiny` uses the tiny preset, to try the benchmark on any machine. With `--minutes` it starts no process that would not
finish in time. The JSON is written after every process.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import timing
from megafp8.analysis.runs import load_run
from megafp8.config import dimensions, model_shapes
from megafp8.config import flags as config_flags
from megafp8.device.energy import has_library

COMMON = (
    "--lr 3e-5 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.95 --bf16 --mock-data "
    "--tokenizer-type NullTokenizer --eval-iters 0 --log-interval 4 --no-progress-bar"
)
SAVING = "--no-save-optim --no-save-rng --save"
ON_GPU = "--vocab-size 50303 --num-workers 2"
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
LLAMA3_TOKENS = "--vocab-size 128255 --num-workers 2"
MIXTURE = (
    "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 4 --global-batch-size 16 "
    f"--moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion {ON_GPU}"
)
SHAPES = {
    "A": "--model-preset llama-1b --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 8 "
    f"--global-batch-size 8 {ON_GPU}",
    "B": "--model-preset llama3-8b --num-layers 8 --seq-length 4096 --max-position-embeddings 4096 "
    f"--micro-batch-size 2 --global-batch-size 2 {ON_GPU}",
    "B32k": "--model-preset llama3-8b --num-layers 8 --seq-length 32768 --max-position-embeddings 32768 "
    f"--micro-batch-size 1 --global-batch-size 1 {ON_GPU}",
    "B128k": "--model-preset llama3-8b --num-layers 8 --seq-length 131072 --max-position-embeddings 131072 "
    f"--micro-batch-size 1 --global-batch-size 1 --recompute-granularity selective --recompute-modules mlp {ON_GPU}",
    "C": "--model-preset llama-1b --hidden-size 1024 --ffn-hidden-size 2816 --seq-length 2048 --micro-batch-size 1 "
    f"--max-position-embeddings 2048 --global-batch-size 1 {ON_GPU}",
    "D": "--model-preset llama-1b --hidden-size 1024 --ffn-hidden-size 2816 --seq-length 2048 --micro-batch-size 8 "
    f"--max-position-embeddings 2048 --global-batch-size 8 {ON_GPU}",
    "M1": f"--model-preset qwen3-30b-a3b --num-layers 6 {MIXTURE}",
    "M2": f"--model-preset qwen3-30b-a3b --num-layers 24 --num-experts 16 {MIXTURE}",
    "M3": f"--model-preset mixtral-8x7b --num-layers 2 {MIXTURE} --micro-batch-size 2",
    "gpt2-124m": f"--model-preset gpt2-124m {NO_DROPOUT} --seq-length 1024 --micro-batch-size 32 "
    f"--global-batch-size 256 {ON_GPU}",
    "gpt2-350m": f"--model-preset gpt2-350m {NO_DROPOUT} --seq-length 1024 --micro-batch-size 16 "
    f"--global-batch-size 128 {ON_GPU}",
    "llama3.2-1b": "--model-preset llama3.2-1b --seq-length 4096 --micro-batch-size 2 --global-batch-size 16 "
    f"{LLAMA3_TOKENS}",
    "llama3.2-3b": "--model-preset llama3.2-3b --seq-length 4096 --micro-batch-size 2 --global-batch-size 16 "
    f"{LLAMA3_TOKENS}",
    "llama3-8b": "--model-preset llama3-8b --seq-length 8192 --micro-batch-size 1 --global-batch-size 8 "
    f"{LLAMA3_TOKENS}",
    "tiny": "--model-preset tiny --seq-length 64 --micro-batch-size 2 --global-batch-size 2 --vocab-size 511 "
    "--num-workers 0 --num-threads 1",
}
BASELINE = "bf16"
MODES = {
    BASELINE: "",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 1024 --fp8-amax-compute-algo max",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}
NATIVE = tuple(MODES)
MODES["tensorwise-e4m3"] = "--fp8-format e4m3 --fp8-recipe tensorwise"
MODES["delayed-e4m3"] = MODES["delayed"].replace("hybrid", "e4m3")
EMULATED = {
    "emulated-tensorwise": MODES["tensorwise"],
    "emulated-delayed": MODES["delayed"],
    "emulated-blockwise": MODES["blockwise"],
    "emulated-mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "emulated-nvfp4": "--fp4-format e2m1 --fp4-recipe nvfp4",
}
MODES |= {mode: f"{flags} --transformer-impl emulated" for mode, flags in EMULATED.items()}
PEERS = {f"peer-{recipe}": recipe for recipe in NATIVE}
FASTEST_PEER = "peer-delayed"
ON_ANY_MACHINE = (BASELINE, "tensorwise")
ERROR_LINES = 15


@dataclass(frozen=True)
class Process:
    """What one process measured.

    Attributes:
        step_ms: median of its last steps.
        attention: the kernels that ran.
        joules_per_token: mean over these steps; None without the driver's library. Its counter is renewed some ten
            times a second, so that steps of less than 100 ms need more of them.
        spread_fraction: (slowest - fastest) / median of these steps; None of a peer's, which are timed together.
        wall_s: the whole process, start and saving included.
    """

    mode: str
    round: int
    step_ms: float
    spread_fraction: Optional[float]
    tokens_per_second: float
    tflops: float
    peak_gib: float
    attention: str
    loss: float
    device: str
    wall_s: float
    joules_per_token: Optional[float] = None


class Failed(Exception):
    """A process ended with an error; the text is the end of what it said."""


def command_of(options: argparse.Namespace, mode: str, folder: str) -> list[str]:
    """The command line of one process."""
    steps = f"--train-iters {options.train_iters} {'--log-energy' if options.energy else ''}"
    text = f"{SHAPES[options.shape]} {COMMON} {steps} {MODES[mode]} {options.extra}"
    return ["pretrain_gpt.py", *shlex.split(f"{text} {SAVING}"), folder]


def run_process(options: argparse.Namespace, mode: str, number: int) -> Process:
    """Train and read the records.

    Raises:
        Failed: the process did not end well.
    """
    if mode in PEERS:
        return run_peer(options, mode, number)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu_train_", dir=options.folder) as folder:
        start(command_of(options, mode, folder))
        run = load_run(folder)
    steps = run.steps[-options.steps :]
    times = [step.step_ms for step in steps]
    step_ms = statistics.median(times)
    joules = [step.joules_per_token for step in steps if step.joules_per_token is not None]
    tokens_per_second = statistics.median(step.tokens_per_second for step in steps)
    return Process(
        mode=mode,
        round=number,
        step_ms=step_ms,
        spread_fraction=(max(times) - min(times)) / step_ms,
        tokens_per_second=tokens_per_second,
        tflops=tokens_per_second * (run.info.flops_per_token or 0.0) / 1e12,
        peak_gib=max(step.memory_peak_bytes or 0 for step in run.steps) / 2**30,
        attention=next((event.detail for event in run.events if event.name == "attention"), "unknown"),
        loss=steps[-1].loss,
        device=run.info.device_name,
        wall_s=time.monotonic() - started,
        joules_per_token=statistics.mean(joules) if joules else None,
    )


def run_peer(options: argparse.Namespace, mode: str, number: int) -> Process:
    """Let megatron-core's loop train.

    Raises:
        Failed: the process did not end well.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu_train_", dir=options.folder) as folder:
        result = Path(folder) / "steps.json"
        steps = ["--warm-up", str(options.train_iters - options.steps), "--steps", str(options.steps)]
        start(["benchmarks/gpu_steps.py", "--shape", options.shape, "--rounds", "1", *steps, "--json", str(result),
               "--modes", f"{mode}=@{PEERS[mode]}"])  # fmt: skip
        (timed,) = json.loads(result.read_text(encoding="utf-8"))["done"]
    config = config_flags.parse(shlex.split(f"{SHAPES[options.shape]} {COMMON}")).config
    length, batch = config.data.seq_length, config.training.global_batch_size
    assert length is not None and batch is not None and config.model.vocab_size is not None
    padded = dimensions.padded_vocab_size(config, config.model.vocab_size + 1)  # the null tokenizer's end of a document
    tokens_per_second = 1e3 * length * batch / timed["step_ms"]
    joules = timed["joules_per_step"]
    return Process(
        mode=mode, round=number, step_ms=timed["step_ms"], spread_fraction=None, tokens_per_second=tokens_per_second,
        tflops=tokens_per_second * model_shapes.flops_per_token(config.model, padded, length) / 1e12,
        peak_gib=timed["peak_gib"], attention=timed["attention"], loss=timed["losses"][-1],
        device=timed["device"], wall_s=time.monotonic() - started,
        joules_per_token=None if joules is None else joules / (length * batch),
    )  # fmt: skip


def start(command: list[str]) -> None:
    """Run a Python program and wait.

    Raises:
        Failed: it did not end well.
    """
    argv = [sys.executable, *command]
    ended = subprocess.run(argv, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if ended.returncode:
        tail = "\n".join(ended.stdout.splitlines()[-ERROR_LINES:])
        raise Failed(f"{shlex.join(command)}\nended with {ended.returncode}:\n{tail}")


def measure(options: argparse.Namespace) -> tuple[list[Process], list[str]]:
    """All modes in turns. What was measured, and what failed; a mode that failed once is not tried again."""
    deadline = time.monotonic() + 60 * options.minutes
    done: list[Process] = []
    failures: dict[str, str] = {}
    for number in range(options.rounds):
        modes = [mode for mode in options.modes if mode not in failures]
        for mode in modes if number % 2 == 0 else reversed(modes):
            longest_s = max((process.wall_s for process in done), default=0.0)
            if time.monotonic() + 1.2 * longest_s > deadline:
                return done, [*failures.values(), f"stopped in round {number + 1}: --minutes {options.minutes:g}"]
            try:
                latest = run_process(options, mode, number)
                done.append(latest)
                print(f"round {number + 1} {mode}: {latest.step_ms:.1f} ms a step, {latest.wall_s:.0f} s", flush=True)
            except Failed as failed:
                failures[mode] = f"{mode}: {failed}"
            write(options, done, list(failures.values()))
    return done, list(failures.values())


def ratio_to(other: str, done: Sequence[Process], mode: str) -> Optional[timing.Ratio]:
    """How many times another mode's speed a mode has, from the rounds that have both."""
    baseline = {process.round: process.step_ms for process in done if process.mode == other}
    pairs = [(baseline[p.round], p.step_ms) for p in done if p.mode == mode and p.round in baseline]
    return timing.ratio_of(*zip(*pairs, strict=True)) if pairs else None


def summarize(done: Sequence[Process]) -> list[dict[str, Any]]:
    """A row for each mode: medians over its rounds."""
    rows = []
    for mode in dict.fromkeys(process.mode for process in done):
        mine = [process for process in done if process.mode == mode]
        medians = {
            name: statistics.median(getattr(process, name) for process in mine)
            for name in ("step_ms", "tokens_per_second", "tflops", "peak_gib", "loss")
        }
        joules = [process.joules_per_token for process in mine if process.joules_per_token is not None]
        spreads = [process.spread_fraction for process in mine if process.spread_fraction is not None]
        attention = " / ".join(dict.fromkeys(process.attention for process in mine))
        rows.append({
            "mode": mode, "rounds": len(mine), **medians, "to_bf16": ratio_to(BASELINE, done, mode),
            "to_peer": ratio_to(FASTEST_PEER, done, mode), "attention": attention,
            "spread_fraction": statistics.median(spreads) if spreads else None,
            "joules_per_token": statistics.median(joules) if joules else None,
        })  # fmt: skip
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """The summary for people."""
    header = ("mode", "step ms", "tokens/s", "TFLOP/s", "peak GiB", "mJ/token", "speed to BF16 [range]",
              "to the peer's delayed", "spread", "attention")  # fmt: skip
    cells = [
        (row["mode"], row["step_ms"], row["tokens_per_second"], row["tflops"], row["peak_gib"],
         "" if row["joules_per_token"] is None else f"{1e3 * row['joules_per_token']:.2f}", row["to_bf16"],
         row["to_peer"], "" if row["spread_fraction"] is None else f"{row['spread_fraction']:.1%}", row["attention"])
        for row in rows
    ]  # fmt: skip
    print(timing.format_table(header, cells))


def write(options: argparse.Namespace, done: Sequence[Process], failures: Sequence[str]) -> None:
    """The JSON so far."""
    if options.json:
        ours = [mode for mode in options.modes if mode in MODES]
        command = " ".join(command_of(options, ours[-1], "RUN_FOLDER")) if ours else None
        timing.write_json(options.json, {
            "options": vars(options), "last_mode_command": command, "summary": summarize(done),
            "processes": list(done), "failures": list(failures),
        })  # fmt: skip


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="A", help="model and batch")
    parser.add_argument("--tiny", action="store_true", help="the tiny preset, in the modes that any machine has")
    parser.add_argument("--modes", nargs="+", choices=[*MODES, *PEERS], help="default: all native, and a peer")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each mode")
    parser.add_argument("--train-iters", type=int, default=16, help="steps of a process")
    parser.add_argument("--steps", type=int, default=10, help="last steps that count")
    parser.add_argument("--extra", default="", help='more flags for every mode: --extra="--flag value"')
    parser.add_argument("--minutes", type=float, default=60.0, help="time that all processes together may take")
    parser.add_argument("--folder", type=Path, help="where runs are saved for a moment; default the system's temporary")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(argv)
    if options.tiny:
        options.shape = "tiny"
    options.energy = options.shape != "tiny" and has_library()
    options.modes = options.modes or list(ON_ANY_MACHINE if options.tiny else (*NATIVE, FASTEST_PEER))
    return options


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit status 1 if anything failed or was left out."""
    options = parse(argv)
    done, failures = measure(options)
    write(options, done, failures)
    print(
        f"shape {options.shape}, {options.train_iters} steps, median of the last {options.steps}, "
        f"{options.rounds} rounds, {done[0].device if done else 'nothing measured'}"
    )
    print_table(summarize(done))
    for failure in failures:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
