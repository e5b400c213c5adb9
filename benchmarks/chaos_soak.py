"""Fault injection: a supervised training run under hundreds of faults, compared with the same run without faults.

    python benchmarks/chaos_soak.py --seed 1 --steps 2000 --faults 200 [--fork] [--folder DIR] [--json FILE]

Two gloo ranks train a small model in FP8 (delayed scaling) with dropout and evaluations, under the supervisor of
`launcher/supervise.py`. The seed determines the faults: ranks killed at any time and during saves, all ranks killed at
once, signals, stopped and slow ranks, full and failing disks, non-finite values. There is no manual intervention. At
the end weights, optimizer, scales, random states and samples must be bitwise equal to those of the run without faults.
The exit status is 1 if they are not, or if a fault never occurred.

With `--fork`, ranks are forked from a process that has imported everything; otherwise each start is `torchrun`, as for
a user, and most of a recovery is the time of Python's imports. Needs the packages of the tests.

| figure | meaning |
|---|---|
| lost steps | steps that were repeated because no checkpoint had them |
| recovery | time from the fault to the end of the first new step after it, for faults that end a start |
| effective time | duration of the run without faults / duration with faults |
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import conftest  # noqa: F401
import forked_runs

from megafp8.launch.supervisor import RESTARTS_FILE, RestartPolicy, Supervisor
from megafp8.resilience import fault_injection
from megafp8.resilience.run_state import read_run_state
from megafp8.utils.process import STOP_SIGNALS, set_parent_death_signal

WORLD_SIZE = 2
SAVE_INTERVAL, EVAL_INTERVAL = 5, 10
# A step takes 0.1 s, and 2 s when the machine has other work. The first of a start may take 5 times as long.
STEP_TIMEOUT_S = 10
# What the launcher gives the other ranks when one has failed.
GRACE_S, A_DAY_S = 15.0, 86400.0
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 63 --swiglu "
    "--make-vocab-size-divisible-by 16 --position-embedding-type rope --tokenizer-type NullTokenizer --mock-data "
    "--num-workers 1 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-warmup-iters 2 --eval-iters 1 "
    f"--save-interval {SAVE_INTERVAL} --eval-interval {EVAL_INTERVAL} --ckpt-keep 3 --use-distributed-optimizer "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --bf16 --fp8-format hybrid --fp8-recipe delayed "
    f"--fp8-amax-history-len 4 --no-progress-bar --log-interval 100 --step-timeout-s {STEP_TIMEOUT_S}"
)

IN_STEP = ("step.begin", "data.wait", "step.after_backward", "step.before_update", "step.after_update")
IN_SAVE = ("save.begin", "save.state_gathered", "save.mid_shard", "save.shards_written", "save.end")
IN_SAVE_ON_RANK_0 = (
    "save.before_manifest", "save.before_rename", "save.after_rename", "save.before_pointer", "save.after_pointer",
)  # fmt: skip
WHERE_DISKS_FAIL = ("save.mid_shard", "save.shards_written", "save.before_manifest", "save.before_rename")
IN_EVALUATION = ("evaluation.begin", "evaluation.batch")
ENDS_A_START = ("kill", "kill all", "signal", "stop", "bad numbers")


@dataclass(frozen=True)
class Kind:
    """A kind of fault: its share of all, the points it may strike at, and how it is written in a plan."""

    share: float
    points: tuple[str, ...]
    entries: tuple[str, ...]
    is_on_all: bool = False


KINDS = {
    "disk": Kind(0.12, WHERE_DISKS_FAIL, ("full", "raise")),
    "kill": Kind(0.42, IN_STEP + IN_SAVE + IN_SAVE_ON_RANK_0 + IN_EVALUATION, ("kill",)),
    "kill all": Kind(0.08, ("step.after_backward", "save.mid_shard", "save.shards_written"), ("kill",), is_on_all=True),
    "signal": Kind(0.17, IN_STEP + IN_SAVE[:1] + IN_EVALUATION, ("term", "usr1", "int")),
    "stop": Kind(0.03, IN_STEP, ("stop",)),
    "slow": Kind(0.08, IN_STEP + IN_SAVE + IN_EVALUATION, ("sleep:seconds=0.3",)),
    "bad numbers": Kind(0.10, ("step.gradients", "step.loss"), ("nan", "inf")),
}


def draw_faults(seed: int, num_steps: int, num_faults: int) -> list[tuple[str, str]]:
    """Kind and plan entry of each fault, each in a step of its own.

    A checkpoint keeps a run from its earlier steps: were two faults at one step, the second might never be reached.
    Signals stay away from saves and evaluations of the steps after, which they would forestall.
    """
    draw = random.Random(seed)
    special = list(range(SAVE_INTERVAL, num_steps, SAVE_INTERVAL))
    plain = [step for step in range(1, num_steps) if step % SAVE_INTERVAL in (1, 2, 3)]
    draw.shuffle(special)
    draw.shuffle(plain)
    evaluated = [step for step in special if step % EVAL_INTERVAL == 0]
    counts = {name: round(kind.share * num_faults) for name, kind in KINDS.items()}
    counts["kill"] += num_faults - sum(counts.values())
    drawn = []
    for name, kind in KINDS.items():
        for _ in range(counts[name]):
            points = [point for point in kind.points if special or not point.startswith("save.")]
            points = [point for point in points if evaluated or not point.startswith("evaluation.")]
            point = draw.choice(points)
            if point.startswith("evaluation."):
                step = evaluated.pop()
                special.remove(step)
            elif point.startswith("save."):
                step = special.pop()
                evaluated = [each for each in evaluated if each != step]
            else:
                step = plain.pop()
            rank = 0 if point in (*IN_SAVE_ON_RANK_0, *WHERE_DISKS_FAIL[2:]) else draw.randrange(WORLD_SIZE)
            entry, _, extra = draw.choice(kind.entries).partition(":")
            who = "" if kind.is_on_all else f"rank={rank},"
            drawn.append((name, f"{entry}:{who}step={step},at={point}" + (f",{extra}" if extra else "")))
    return drawn


class ForkedStart:
    """In the place of torchrun's process: one that forks the ranks, waits for them, and ends with 1 if one failed."""

    def __init__(self, flags: str, environment: dict[str, str], outputs: Path):
        self._process = get_context("fork").Process(target=self._launch, args=(flags, environment, outputs))
        self._process.start()

    @staticmethod
    def _launch(flags: str, environment: dict[str, str], outputs: Path) -> None:
        os.setsid()
        set_parent_death_signal(signal.SIGTERM)
        for number in (*STOP_SIGNALS, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        os.environ |= environment
        plan, fired = (
            environment.get(fault_injection.FAULTS_VARIABLE, ""),
            environment.get(fault_injection.FIRED_VARIABLE),
        )
        with forked_runs.started(WORLD_SIZE, flags, plan, Path(fired) if fired else None) as run:
            ended = run.wait(A_DAY_S, GRACE_S)
        with open(outputs, "a", encoding="utf-8") as stream:
            stream.writelines(f"--- rank {rank}\n{text}\n" for rank, text in enumerate(ended.output))
        sys.exit(int(any(ended.statuses)))

    def wait(self) -> int:
        """Its exit status, when it has ended."""
        self._process.join()
        return self._process.exitcode or 0

    def send_signal(self, number: int) -> None:
        """As to any process."""
        os.kill(self._process.pid or 0, number)


class ForkingSupervisor(Supervisor):
    """Starts forked ranks; everything else is the product's."""

    def launch(self, environment: dict[str, str]) -> Any:
        """Fork them."""
        return ForkedStart(" ".join(self.command), environment, self.folder / "output.txt")


def supervise(folder: Path, num_steps: int, cache: Path, plan: str, forked: bool, tell: Callable[[str], None]) -> float:
    """Run to the end; seconds that it took.

    Raises:
        SystemExit: the supervisor gave up.
    """
    folder.mkdir(parents=True)
    flags = f"{FLAGS} --train-iters {num_steps} --data-cache-path {cache} --save {folder} --load {folder}"
    limits = RestartPolicy(max_restarts=20, retry_bad_numbers=True, backoff_s=0.05, grace_s=GRACE_S)
    os.environ |= {fault_injection.FAULTS_VARIABLE: plan, fault_injection.FIRED_VARIABLE: str(fired_folder(folder))}
    script = str(ROOT / "pretrain_gpt.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD_SIZE)]
    kind, command = (ForkingSupervisor, []) if forked else (Supervisor, [*torchrun, script])
    supervisor = kind([*command, *flags.split()], folder, limits, tell)
    began = time.monotonic()
    status = supervisor.run()
    if status:
        raise SystemExit(f"the supervisor gave up with status {status}; see {folder}")
    return time.monotonic() - began


def fired_folder(folder: Path) -> Path:
    """Where struck faults are remembered."""
    return folder / "faults"


def content_hash(folder: Path) -> dict[str, str]:
    """What the last checkpoint holds, by the command for it."""
    tool = [sys.executable, str(ROOT / "tools" / "checkpoint.py"), "hash", str(folder), "--json"]
    return json.loads(subprocess.run(tool, check=True, capture_output=True, text=True).stdout)


def report(
    options: argparse.Namespace, drawn: list[tuple[str, str]], peace: Path, soak: Path, peace_s: float, soak_s: float
) -> dict[str, Any]:
    """All figures of the two runs."""
    struck: Counter[str] = Counter()
    times: list[tuple[float, str]] = []
    for path in sorted(fired_folder(soak).glob("*.1")):
        name = drawn[int(path.name.split(".")[0])][0]
        times.append((path.stat().st_mtime, name))
    numbers = {int(path.name.split(".")[0]) for path in fired_folder(soak).iterdir()}
    struck.update(drawn[number][0] for number in numbers)
    starts = [json.loads(line) for line in (soak / RESTARTS_FILE).read_text().splitlines()]
    recoveries = recovery_times(starts, times)
    lost = [start["lost_steps"] for start in starts]
    hashes = content_hash(peace), content_hash(soak)
    return {
        "seed": options.seed, "steps": options.steps, "launcher": "fork" if options.fork else "torchrun",
        "cpus": len(os.sched_getaffinity(0)),
        "faults_planned": len(drawn), "faults_struck": dict(struck), "starts": len(starts),
        "ends": dict(Counter(f"{start['state']} {start['exit_status']}" for start in starts)),
        "lost_steps": {"total": sum(lost), "max": max(lost)},
        "recovery_s": {
            "p50": quantile(recoveries, 0.5), "p95": quantile(recoveries, 0.95), "max": max(recoveries, default=None),
            "count": len(recoveries),
        },
        "peace_s": peace_s, "soak_s": soak_s, "effective_time": peace_s / soak_s,
        "faults_per_minute": 60 * len(numbers) / soak_s,
        "final_step": getattr(read_run_state(soak), "step", None),
        "is_equal": hashes[0] == hashes[1], "hashes": {"peace": hashes[0], "soak": hashes[1]},
    }  # fmt: skip


def recovery_times(starts: Sequence[dict[str, Any]], times: Sequence[tuple[float, str]]) -> list[float]:
    """Seconds from the fault that ended a start to the first step of the next start that did one."""
    recoveries, since = [], None
    for before, start in zip(starts, starts[1:], strict=False):
        ending = [
            when for when, name in times
            if name in ENDS_A_START and before["started_at"] <= when <= before["ended_at"]
        ]  # fmt: skip
        since = since or max(ending, default=before["ended_at"])
        if start["recovery_s"] is not None:
            recoveries.append(before["ended_at"] + start["recovery_s"] - since)
            since = None
    return recoveries


def quantile(values: Sequence[float], share: float) -> Optional[float]:
    """The value below which this share of all lies, by linear interpolation; None without values."""
    if len(values) < 2:
        return next(iter(values), None)
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def shown(figures: dict[str, Any]) -> str:
    """The report for people."""
    seconds = figures["recovery_s"]
    recovery = "none" if seconds["p50"] is None else f"p50 {seconds['p50']:.1f} s, p95 {seconds['p95']:.1f} s"
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(figures["faults_struck"].items()))
    return "\n".join(
        [
            f"faults         {sum(figures['faults_struck'].values())} of {figures['faults_planned']} struck: {kinds}",
            f"starts         {figures['starts']} with {figures['launcher']}, "
            + ", ".join(f"{count} {end}" for end, count in figures["ends"].items()),
            f"lost steps     {figures['lost_steps']['total']} of {figures['steps']}, "
            f"at most {figures['lost_steps']['max']} at once (saves every {SAVE_INTERVAL})",
            f"recovery       {recovery}, {seconds['count']} times",
            f"effective time {figures['effective_time']:.1%}: {figures['peace_s']:.0f} s in peace, "
            f"{figures['soak_s']:.0f} s under {figures['faults_per_minute']:.1f} faults a minute",
            f"final state    {'equal bit for bit' if figures['is_equal'] else 'NOT EQUAL'}"
            f" {figures['hashes']['soak']['all'][:16]}",
        ]
    )


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="draws the faults")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="of each of the two runs")
    parser.add_argument("--faults", type=int, default=200, metavar="N", help="in all")
    parser.add_argument("--fork", action="store_true", help="fork ranks instead of starting them with torchrun")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for both runs; a temporary one if not given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args(argv)
    if options.fork:
        forked_runs.prepare()
    with tempfile.TemporaryDirectory(prefix="chaos_") as temporary:
        folder = options.folder or Path(temporary)
        cache, peace, soak = folder / "cache", folder / "peace", folder / "soak"
        drawn = draw_faults(options.seed, options.steps, options.faults)

        def tell(text: str) -> None:
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

        supervise(folder / "warm", 4, cache, "", options.fork, tell)  # builds the indices that both runs read
        peace_s = supervise(peace, options.steps, cache, "", options.fork, tell)
        soak_s = supervise(soak, options.steps, cache, ";".join(entry for _, entry in drawn), options.fork, tell)
        figures = report(options, drawn, peace, soak, peace_s, soak_s)
    print(shown(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return int(not figures["is_equal"] or sum(figures["faults_struck"].values()) < len(drawn))


if __name__ == "__main__":
    sys.exit(main())
