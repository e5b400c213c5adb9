"""Planted faults and clean runs: how early the guard warns, what a repair brings back, and how often it is wrong.

    python benchmarks/planted_faults.py [--clean-seeds 20] [--fault-seeds 2] [--recipes NAMES] [--json FILE]

A small model trains on the bytes of Python's standard library, in one process, with the loop's own extensions. Clean
runs have `--fp8-guard warn`, `--spike-policy skip` and counters of operands; any of their events is a false alarm. Each
fault (`layer_faults.py`) is planted into runs of the same seeds, without a repair and with each repair, and compared
with the clean run of its seed (`fault_costs.py`). Runs in the JSON file are not repeated, so that a benchmark resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import timing
from benchmarks.fault_costs import CLEAN, HEADER, REPAIR, fault_rows, row_cells
from benchmarks.in_process import end_runs, start_run
from benchmarks.layer_faults import (
    ALIGNED_SWIGLU,
    INFINITE_ACTIVATION,
    INFLATED_QK,
    OUTLIER_CHANNEL,
    SPIKE_BATCH,
    Fault,
    PlantedFault,
)
from megafp8.checkpoint.progress import Progress
from megafp8.cli import corpus, preprocess
from megafp8.errors import NumericsError
from megafp8.metrics.records import EventRecord, StepRecord
from megafp8.metrics.sinks import Sinks
from megafp8.training.extension import LoopState
from megafp8.training.extensions.guard import LayerGuard
from megafp8.training.extensions.step_records import StepRecords
from megafp8.training.loop import train_steps
from megafp8.training.run import Run

RECIPES = {
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}
WITHOUT_HISTORY = ("tensorwise", "blockwise")
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 160 --seq-length 64 "
    "--max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
TRAINING = (
    "--bf16 --transformer-impl emulated --micro-batch-size 16 --global-batch-size 16 --lr 1.5e-3 --min-lr 1.5e-4 "
    "--lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 "
    "--num-threads 1 --num-workers 0 --eval-iters 0 --no-progress-bar --log-interval 1000"
)
WARN = "--fp8-guard warn"
SPIKES = "--spike-policy skip --max-skipped-steps 3"
ARMS = {
    CLEAN: f"{SPIKES} {WARN}",
    OUTLIER_CHANNEL: WARN,
    f"{OUTLIER_CHANNEL}{REPAIR}bf16-layer": f"{SPIKES} --fp8-guard bf16-layer",
    ALIGNED_SWIGLU: WARN,
    f"{ALIGNED_SWIGLU}{REPAIR}bf16-layer": f"{SPIKES} --fp8-guard bf16-layer",
    f"{ALIGNED_SWIGLU}{REPAIR}smooth-swiglu": f"{SPIKES} --fp8-guard smooth-swiglu",
    INFLATED_QK: WARN,
    SPIKE_BATCH: WARN,
    f"{SPIKE_BATCH}{REPAIR}skip": f"{SPIKES} {WARN}",
    INFINITE_ACTIVATION: WARN,
    f"{INFINITE_ACTIVATION}{REPAIR}skip": f"{SPIKES} {WARN} --on-nonfinite-activation skip",
    f"{INFINITE_ACTIVATION}{REPAIR}bf16": f"{SPIKES} {WARN} --on-nonfinite-activation bf16",
}
"""Name of an arm to its flags. Without a repair no step is skipped: a skip is a repair."""


class Arm(NamedTuple):
    """A run: its recipe, seed, and name in `ARMS`."""

    recipe: str
    seed: int
    name: str


class Records:
    """A sink that keeps losses, gradient norms and events."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[Optional[float]] = []
        self.events: list[tuple[int, str, str]] = []

    def write(self, record: Any) -> None:
        if isinstance(record, StepRecord):
            self.losses.append(record.loss)
            self.norms.append(record.grad_norm)
        elif isinstance(record, EventRecord):
            self.events.append((record.step, record.name, record.detail))

    def close(self) -> None:
        pass


def arms_of(options: argparse.Namespace) -> list[Arm]:
    """All runs; those without a fault come first."""
    recipes = options.recipes.split(",")
    clean = [Arm(recipe, seed, CLEAN) for recipe in recipes for seed in range(1, options.clean_seeds + 1)]
    planted = [
        Arm(recipe, seed, name)
        for seed in range(1, options.fault_seeds + 1)
        for recipe in recipes
        for name in options.arms.split(",")
        if name != CLEAN and (not name.endswith("smooth-swiglu") or recipe in WITHOUT_HISTORY)
    ]
    return clean + planted


def train(run: Run, fault: Optional[Fault]) -> Records:
    """Train to the end, with the guard and with a fault if there is one."""
    records = Records()
    state = LoopState(run=run, sinks=Sinks([records]), progress=Progress(), started=time.monotonic())
    with suppress(NumericsError):  # the run stopped, and has recorded why
        train_steps(state, [*([PlantedFault(fault)] if fault else []), StepRecords(), LayerGuard()])
    return records


def flags_of(arm: Arm, options: argparse.Namespace, data: Path) -> str:
    """The command line of a run."""
    text = f"--tokenizer-type ByteLevelTokenizer --data-path {data}_text_document --split 90,10,0"
    return (
        f"{MODEL} {TRAINING} {RECIPES[arm.recipe]} --train-iters {options.steps} --seed {arm.seed} "
        f"--fp8-guard-interval {options.guard_interval} "
        f"{text} --data-cache-path {data.parent / 'cache'} {ARMS[arm.name]}"
    )


def prepare_data(folder: Path) -> Path:
    """The prefix of the shards, which are written unless they exist."""
    prefix = folder.resolve() / "bytes"
    if not prefix.with_name("bytes_text_document.idx").exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        text = prefix.with_suffix(".jsonl")
        corpus.main(["--output", str(text), "--max-bytes", "2000000"])
        preprocess.main(["--input", str(text), "--output-prefix", str(prefix), "--append-eod",
                         "--tokenizer-type", "ByteLevelTokenizer"])  # fmt: skip
    return prefix


def tables(found: dict[Arm, Any], fault_step: int) -> str:
    """False alarms of the clean runs, and the rows of the faults."""
    events = {
        (arm.recipe, arm.name, str(arm.seed)): [EventRecord(step=step, name=name, detail=detail)
                                                for step, name, detail in entry["events"]]
        for arm, entry in found.items()
    }  # fmt: skip
    losses = {(arm.recipe, arm.name, str(arm.seed)): entry["losses"] for arm, entry in found.items()}
    lines = [
        f"false alarm: {recipe}, seed {seed}, step {event.step}: {event.name}: {event.detail}"
        for (recipe, name, seed), own in events.items() if name == CLEAN for event in own
    ]  # fmt: skip
    rows = sorted(fault_rows(losses, events, fault_step), key=lambda row: (row.fault, row.repair))
    return "\n".join([*lines, timing.format_table(HEADER, [row_cells(row) for row in rows])])


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clean-seeds", type=int, default=20, help="clean runs of each recipe (default 20)")
    parser.add_argument("--fault-seeds", type=int, default=2, help="runs of each fault, repair and recipe (default 2)")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="default %(default)s")
    parser.add_argument("--arms", default=",".join(ARMS), help="faults and repairs beside clean runs (default: all)")
    parser.add_argument("--guard-interval", type=int, default=10, help="steps between statistics (default 10)")
    parser.add_argument("--steps", type=int, default=230)
    parser.add_argument("--fault-step", type=int, default=70)
    parser.add_argument("--growth", type=float, default=1.12, help="of gradual faults in a step (default 1.12)")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "planted_faults", help="the text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results of all runs, one a line; read first")
    options = parser.parse_args(argv)
    found: dict[Arm, Any] = {}
    if options.json and options.json.exists():
        for line in options.json.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found[Arm(**entry.pop("arm"))] = entry
    data = prepare_data(options.folder)
    wanted = arms_of(options)
    for arm in (arm for arm in wanted if arm not in found):
        kind = arm.name.partition(REPAIR)[0]
        fault = None if kind == CLEAN else Fault(kind, options.fault_step, options.growth)
        records = train(start_run(flags_of(arm, options, data)), fault)
        end_runs()
        found[arm] = {"losses": records.losses, "norms": records.norms, "events": records.events}
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"arm": arm._asdict(), **found[arm]}) + "\n")
        print(" ".join(map(str, arm)), f"{records.losses[-1]:.3f}", records.events[:1], file=sys.stderr, flush=True)
    print(f"{options.steps} steps, fault from step {options.fault_step} on, growth {options.growth}")
    print(tables({arm: found[arm] for arm in wanted}, options.fault_step))


if __name__ == "__main__":
    main()
