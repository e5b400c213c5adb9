"""Known-bad controls against their good forms over paired seeds, at a size that tells some of them apart.

    python benchmarks/known_bad_controls.py [--seeds 5] [--steps 150] [--lr 1e-3] [--json FILE]

The small model and the text of `examples/compare_recipes.sh`, in one process: for every seed BF16, recipes and their
controls train on the same batches from the same weights, and the last validation losses are compared. What decides is
the learning rate: at a high one two runs of a pair drift apart by chance, further than most controls are worse.

A benchmark that was interrupted resumes: runs in the JSON file are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import stdlib_text, timing
from benchmarks.in_process import add_run, end_runs, start_run
from megafp8.analysis.seed_statistics import mean_interval
from megafp8.analysis.stability_statistics import detectable_gap, seeds_needed
from megafp8.checkpoint.progress import Progress
from megafp8.recipes.known_bad import KNOWN_BAD
from megafp8.training.evaluation import build_batches, evaluate
from megafp8.training.extensions.calibration import calibrate, needs_calibration
from megafp8.training.run import Run
from megafp8.training.step import train_step

BASELINE = "bf16"
GOOD = {
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1 --fp4-recipe nvfp4",
}
FORMS = {BASELINE: "", **GOOD, **{name: flags for name, (_, flags) in KNOWN_BAD.items()}}
COMPARED = [*((good, BASELINE) for good in GOOD), *((bad, good) for bad, (good, _) in KNOWN_BAD.items())]
TRAINING = (
    "--bf16 --micro-batch-size 8 --global-batch-size 8 --lr-decay-style cosine --lr-warmup-fraction 0.1 "
    "--weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --eval-iters 64 --num-threads 1 --num-workers 0 "
    "--no-progress-bar"
)


def validation_loss(run: Run, num_steps: int) -> float:
    """Train, and return the last validation loss."""
    if needs_calibration(run):
        calibrate(run, Progress())
    size = run.global_batch_size
    batches = build_batches(run, run.datasets[0], 0, num_steps * size, num_workers=0)
    for step in range(num_steps):
        train_step(run, batches, Progress(step, step * size))
    record = evaluate(run, "valid", run.datasets[1], num_steps, 0)
    assert record is not None
    return record.loss


def table(losses: Mapping[tuple[str, int], float]) -> str:
    """The gaps of every form, with what would show them."""
    rows = []
    for name, reference in COMPARED:
        seeds = [seed for own, seed in losses if own == name and (reference, seed) in losses]
        gap = mean_interval([losses[name, seed] / losses[reference, seed] - 1 for seed in seeds])
        if gap.spread is None or gap.low is None or gap.high is None:
            continue
        needed = "-" if gap.low > 0 else seeds_needed(gap.mean, gap.spread) or "-"
        verdict = "worse" if gap.low > 0 else "better" if gap.high < 0 else "not distinguishable"
        rows.append((name, reference, verdict, f"{gap.mean:+.3%}", f"{gap.low:+.3%} to {gap.high:+.3%}",
                     f"{detectable_gap(gap.spread, len(seeds)):.2%}", str(needed), str(len(seeds))))  # fmt: skip
    header = ("form", "against", "verdict", "gap", "95% interval", "smallest gap shown", "seeds needed", "pairs")
    return timing.format_table(header, rows)


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="default 5")
    parser.add_argument("--steps", type=int, default=150, help="of 1,024 tokens (default 150)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak, which decays to a tenth (default 1e-3)")
    parser.add_argument("--model", default=stdlib_text.MODEL, help="flags of the model")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "known_bad_controls", help="text and tokenizer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="losses of all runs, one a line; read first")
    options = parser.parse_args(argv)
    losses: dict[tuple[str, int], float] = {}
    if options.json and options.json.exists():
        entries = map(json.loads, options.json.read_text(encoding="utf-8").splitlines())
        losses = {(entry["name"], entry["seed"]): entry["valid"] for entry in entries}
    data = options.folder.resolve()
    stdlib_text.prepare_data(data)
    for seed in range(1, options.seeds + 1):
        text = (
            f"{options.model} {TRAINING} --train-iters {options.steps} --lr {options.lr} --min-lr {options.lr / 10} "
            f"--seed {seed} --data-path {data / 'stdlib_text_document'} --split 90,10,0 "
            f"--data-cache-path {data / 'cache'} {' '.join(stdlib_text.tokenizer_flags(data))}"
        )
        due = [name for name in FORMS if (name, seed) not in losses]
        first = start_run(text) if due else None
        for name in due:
            assert first is not None
            flags = f"{text} --transformer-impl emulated {FORMS[name]}"
            losses[name, seed] = validation_loss(first if name == BASELINE else add_run(first, flags), options.steps)
            print(name, seed, f"{losses[name, seed]:.4f}", file=sys.stderr, flush=True)
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"name": name, "seed": seed, "valid": losses[name, seed]}) + "\n")
        if due:
            end_runs()
    print(table(losses))


if __name__ == "__main__":
    main()
