"""Dry run of every command line of Megatron-LM's tests and examples, on the fewest GPUs that hold its layout.

    python tests/command_lines/sweep.py [--family dense|mixture|hybrid] [--write]

Prints how many pass, also of those whose layout fits the GPUs of its record, and the reasons of the others; the exit
status is 1 if answers differ from the recorded ones. `--write` records them and the choice of lines for CI: run it
after a change of flags or rules, and read the difference.
20 seconds on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

# Before the first import of torch: forked processes share this one's threads, and nothing is compiled.
os.environ.update(OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1")
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from command_line_corpus import HERE, Line, Verdict, choose_cover, dry_run, read_lines, read_verdicts


def main(words: Sequence[str]) -> int:
    """Run and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=("dense", "mixture", "hybrid"), help="only these; default: all")
    parser.add_argument("--write", action="store_true", help="record the answers of all families")
    options = parser.parse_args(words)
    if options.write and options.family:
        parser.error("--write records all families: remove --family")
    lines = [line for line in read_lines() if options.family in (None, line.family)]
    verdicts = []
    for done, line in enumerate(lines, start=1):
        verdicts.append(dry_run(line))
        print(f"\r{done} of {len(lines)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    report(lines, verdicts)
    if options.write:
        text = "".join(json.dumps(asdict(verdict)) + "\n" for verdict in verdicts)
        (HERE / "verdicts.jsonl").write_text(text, encoding="utf-8")
        (HERE / "cover.json").write_text(json.dumps(choose_cover(lines, verdicts)) + "\n")
        return 0
    recorded = {verdict.number: verdict for verdict in read_verdicts()}
    changed = [verdict.number for verdict in verdicts if verdict != recorded.get(verdict.number)]
    if changed:
        print(f"differ from verdicts.jsonl (--write records them): lines {', '.join(map(str, changed))}")
    return 1 if changed else 0


def report(lines: Sequence[Line], verdicts: Sequence[Verdict]) -> None:
    """Print the rates by family and the reasons, the most frequent first."""
    on_record = pass_rates(*of_recorded_gpus(lines, verdicts))
    for family, (passed, count) in pass_rates(lines, verdicts).items():
        print(
            f"{family}: {passed} of {count} pass ({passed / count:.1%}), on the GPUs of their records "
            f"{on_record[family][0]} of {count} ({on_record[family][0] / count:.1%})"
        )
    reasons = Counter(re.sub(r"\d[\d.]*", "N", verdict.reason) for verdict in verdicts if verdict.status)
    for reason, count in reasons.most_common():
        print(f"{count:4d}  {reason}")


def pass_rates(lines: Sequence[Line], verdicts: Sequence[Verdict]) -> dict[str, tuple[int, int]]:
    """By family: how many pass, of how many."""
    families = Counter(line.family for line in lines)
    passed = Counter(line.family for line, verdict in zip(lines, verdicts, strict=True) if not verdict.status)
    return {family: (passed[family], count) for family, count in sorted(families.items())}


def of_recorded_gpus(lines: Sequence[Line], verdicts: Sequence[Verdict]) -> tuple[list[Line], list[Verdict]]:
    """Lines whose layout fits the GPUs of their records, and their verdicts."""
    pairs = [pair for pair in zip(lines, verdicts, strict=True) if pair[0].num_gpus == pair[0].world_size]
    return [line for line, _ in pairs], [verdict for _, verdict in pairs]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
