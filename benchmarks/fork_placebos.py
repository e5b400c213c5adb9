"""Placebos of comparisons by forks: BF16 against BF16 with another order of summation, where nothing may be found.

    python benchmarks/fork_placebos.py [--placebos 40] --csv FILE

A placebo has four trunks with two forks each, as `megafp8 run-comparison --forks` has them, and its own seeds: a run,
and from each fork on the same run with half the micro-batch, whose gradients are added in another order. The interval
over trunks is that of the report. At 95% it must hold zero in 38 of 40 placebos; 35 are within chance.

All runs are in this process: a fork repeats its trunk, to the bit, up to the step of the fork. A benchmark that was
interrupted resumes: placebos in the file are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import stdlib_text
from benchmarks.in_process import add_run, end_runs, start_run
from megafp8.analysis.forks import ForkPoint, by_trunk, over_trunks
from megafp8.checkpoint.progress import Progress
from megafp8.training.evaluation import build_batches, evaluate
from megafp8.training.run import Run
from megafp8.training.step import train_step

TRUNKS, FORKS, LENGTH = 4, (20, 40), 40
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --ffn-hidden-size 192 --seq-length 64 "
    "--max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"
)
TRAINING = (
    "--bf16 --transformer-impl emulated --micro-batch-size 4 --global-batch-size 8 --train-iters 80 --lr 3e-3 "
    "--lr-decay-style cosine --lr-warmup-iters 10 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 "
    "--eval-iters 8 --num-threads 1 --num-workers 0 --no-progress-bar --split 90,10,0"
)


def train(run: Run, first: int, last: int, validated: Sequence[int]) -> dict[int, float]:
    """Train steps from `first` on up to `last`; validation losses by step."""
    size, losses = run.global_batch_size, dict[int, float]()
    batches = build_batches(run, run.datasets[0], first * size, last * size, num_workers=0)
    for step in range(first, last):
        train_step(run, batches, Progress(step, step * size))
        if step + 1 in validated:
            record = evaluate(run, "valid", run.datasets[1], step + 1, 0)
            assert record is not None
            losses[step + 1] = record.loss
    return losses


def costs_of_trunk(text: str) -> dict[int, float]:
    """The cost of another order of summation, by the step of the fork."""
    trunk = start_run(text)
    ends = [fork + LENGTH for fork in FORKS]
    # The first fork is validated where it begins, too: it must be the trunk there.
    base, costs = train(trunk, 0, max(ends), [FORKS[0], *ends]), dict[int, float]()
    for fork, end in zip(FORKS, ends, strict=True):
        run = add_run(trunk, text)
        same = train(run, 0, fork, [FORKS[0]])
        assert same == {FORKS[0]: base[FORKS[0]]}, "a fork begins as its trunk"
        training = dataclasses.replace(run.config.training, micro_batch_size=2)
        other = dataclasses.replace(run, config=dataclasses.replace(run.config, training=training))
        costs[fork] = train(other, fork, end, [end])[end] / base[end] - 1
    end_runs()
    return costs


def read(path: Path) -> list[dict[str, str]]:
    """The placebos in the file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit status 1 if too many placebos find something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--placebos", type=int, default=40, help="default 40")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "fork_placebos", help="text and tokenizer")
    parser.add_argument("--csv", type=Path, required=True, help="intervals, one a line; read first")
    options = parser.parse_args(argv)
    data = options.folder.resolve()
    stdlib_text.prepare_data(data)
    if not options.csv.exists():
        options.csv.write_text("placebo,mean,low,high\n", encoding="utf-8")
    done = {int(row["placebo"]) for row in read(options.csv)}
    for number in (number for number in range(options.placebos) if number not in done):
        costs: dict[ForkPoint, dict[int, float]] = {}
        for seed in range(TRUNKS * number, TRUNKS * (number + 1)):
            text = (
                f"{MODEL} {TRAINING} --seed {seed + 1} --data-path {data / 'stdlib_text_document'} "
                f"--data-cache-path {data / 'cache'} {' '.join(stdlib_text.tokenizer_flags(data))}"
            )
            costs |= {ForkPoint(seed, step): {LENGTH: cost} for step, cost in costs_of_trunk(text).items()}
        (interval,) = over_trunks(by_trunk(costs, [LENGTH]))
        with options.csv.open("a", encoding="utf-8") as file:
            file.write(f"{number},{interval.mean:.6g},{interval.low:.6g},{interval.high:.6g}\n")
    rows = read(options.csv)
    num_holding = sum(float(row["low"]) <= 0 <= float(row["high"]) for row in rows)
    print(f"{num_holding} of {len(rows)} intervals hold zero")
    return int(num_holding < 35 / 40 * len(rows))


if __name__ == "__main__":
    sys.exit(main())
