"""Startup time: `--help` of every command, and the time from start to the first training step.

    python benchmarks/startup.py [--rounds 5] [--json FILE]

Commands run as separate processes, as from a shell, in alternating order; medians. The tiny preset trains on one CPU
rank on synthetic tokens until the line of the first step is printed. A second table has the time of the imports. Bars:
`--help` of `pretrain_gpt.py` 0.5 s, first step 15 s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Optional

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import timing

HELP_BAR_S, FIRST_STEP_BAR_S = 0.5, 15.0
TINY = (
    "pretrain_gpt.py --model-preset tiny --seq-length 128 --micro-batch-size 2 --global-batch-size 2 --train-iters 1 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --eval-iters 0 --num-workers 0 "
    "--num-threads 1 --no-progress-bar"
)
FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
FIRST_STEP = " step 1/1 "
# Without the end of the process, which takes Python most of a second once torch is loaded.
IMPORTS = {
    "import torch": "import os, torch; os._exit(0)",
    "import all": "import os, megafp8.training.checks as c; c.mcore_cpu.install(); import megafp8.training.pretrain; "
    "os._exit(0)",
}


def commands() -> list[str]:
    """Every command that a user may ask for help."""
    return ["pretrain_gpt.py", *(f"tools/{path.name}" for path in sorted((ROOT / "tools").glob("*.py")))]


def process_times_ms(argv: list[str], until: Optional[str] = None) -> tuple[float, float]:
    """Wall and CPU time of a Python process.

    Args:
        argv: what follows `python`, run in the project's root.
        until: stop the clocks at the first line of output with this text; default at the end.

    Raises:
        RuntimeError: the process failed, or ended without that line.
    """
    started, cpu_s, wall_s, output = time.perf_counter(), None, None, []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *argv], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if until is not None and until in line and wall_s is None:
            wall_s, cpu_s = time.perf_counter() - started, sum(psutil.Process(process.pid).cpu_times()[:2])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if until is None:
        wall_s, cpu_s = time.perf_counter() - started, usage.ru_utime + usage.ru_stime
    if process.returncode or wall_s is None or cpu_s is None:
        raise RuntimeError(f"{' '.join(argv)} ended with {process.returncode}:\n{''.join(output)}")
    return wall_s * 1e3, cpu_s * 1e3


def cases(folder: str, only_help: bool) -> dict[str, Callable[[], tuple[float, float]]]:
    """What is timed, by name."""
    found = {f"{command} --help": partial(process_times_ms, [command, "--help"]) for command in commands()}
    if only_help:
        return found
    found |= {name: partial(process_times_ms, ["-c", code]) for name, code in IMPORTS.items()}
    saving = f"--save {folder} --no-save-optim --no-save-rng"
    for name, extra in (("first step", ""), ("first step, FP8", FP8), ("first step, --save", saving)):
        found[name] = partial(process_times_ms, [*TINY.split(), *extra.split()], until=FIRST_STEP)
    return found


def verdicts(times: dict[str, timing.Times]) -> list[str]:
    """A line for each bar."""
    bars = {"pretrain_gpt.py --help": HELP_BAR_S, "first step": FIRST_STEP_BAR_S}
    return [
        f"{name}: {times[name].median_wall_ms / 1e3:.2f} s, "
        f"{'within' if times[name].median_wall_ms <= bar * 1e3 else 'OVER'} the bar of {bar:g} s"
        for name, bar in bars.items()
        if name in times
    ]


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind; medians are reported")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them, which fill the file cache")
    parser.add_argument("--only-help", action="store_true", help="leave out everything that imports torch")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as folder:
        times = timing.take_turns(
            cases(folder, options.only_help), rounds=options.rounds, warmup=options.warmup, times_ms=lambda run: run()
        )
    rows = [(name, side.median_wall_ms / 1e3, side.median_cpu_ms / 1e3, max(side.wall_ms) / 1e3)
            for name, side in times.items()]  # fmt: skip
    print(timing.format_table(("from process start to", "wall s", "CPU s", "longest wall s"), rows))
    print(timing.describe_quiet(times))
    print("\n".join(verdicts(times)))
    if options.json:
        timing.write_json(options.json, {"options": vars(options), "times": times})


if __name__ == "__main__":
    main()
