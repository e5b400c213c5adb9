"""Train every dense command line that passes, shrunk, for three steps on one or two CPU ranks. Before a release.

    python tests/command_lines/train.py [NUMBER...]

Losses must be finite, and bitwise equal to those of the same line without the flags that are accepted without effect.
Each run is forked from this process.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Before the first import of torch: forked ranks share this process's threads, and nothing is compiled.
os.environ.update(OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1")
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from command_line_corpus import Line, read_lines, read_verdicts
from forked_runs import prepare, run_forked
from shrink import STEPS, shrink, without_unused_flags

from megafp8.metrics.records import RECORDS_FILE


def main(words: Sequence[str]) -> int:
    """Train the lines of these numbers, else all dense ones that pass; returns the exit status."""
    prepare()
    lines, verdicts = read_lines(), read_verdicts()
    chosen = [lines[int(word)] for word in words] or [
        line for line in lines if line.family == "dense" and not verdicts[line.number].status
    ]
    start, failed = time.monotonic(), 0
    for done, line in enumerate(chosen, start=1):
        fault = fault_of(line)
        failed += bool(fault)
        print(f"{done} of {len(chosen)}: line {line.number}, {line.source}: {fault or 'trains'}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} train, in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


def fault_of(line: Line) -> str:
    """What is wrong with the training of a line; empty if nothing is."""
    with tempfile.TemporaryDirectory(prefix="line_") as name:
        world_size, words = shrink(line, Path(name) / "full")
        losses = train(world_size, words, Path(name) / "full")
        if isinstance(losses, str):
            return losses
        plain, unused = without_unused_flags(shrink(line, Path(name) / "plain")[1])
        if not unused:
            return ""
        expected = train(world_size, plain, Path(name) / "plain")
        if losses != expected:
            return f"{losses} with {' '.join(unused)}, and {expected} without"
    return ""


def train(world_size: int, words: Sequence[str], folder: Path) -> list[float] | str:
    """The losses of a run, or what went wrong."""
    ended = run_forked(world_size, words, timeout_s=120.0)
    if any(ended.statuses):
        return f"statuses {ended.statuses}: {ended.output[0][-1500:]}"
    records = [json.loads(row) for row in (folder / "save" / RECORDS_FILE).read_text().splitlines()]
    losses = [record["loss"] for record in records if record.get("kind") == "step"]
    if len(losses) != STEPS or not all(map(math.isfinite, losses)):
        return f"losses {losses}"
    return losses


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
