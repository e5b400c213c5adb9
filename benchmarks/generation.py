"""How fast a checkpoint generates text, with and without a key-value cache.

    python benchmarks/generation.py --load runs/quickstart/fp8 [--tokens 120 240] [--rounds 5] [--json FILE]

The time of `generate_text` for one greedy sample, the prompt's pass included and the start of the process not; medians.
Each side has a process of its own, because a process holds the groups of one model. The end of the document does not
end a text. Sides: with a cache; without one in the same precision; without one in the arithmetic of training.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megafp8.mcore import cpu_patches
from megafp8.utils.formatting import markdown_table

SIDES: Mapping[str, Mapping[str, Any]] = {
    "key-value cache": {},
    "--no-cache --precision high": {"uses_cache": False, "precision": "high"},
    "--no-cache": {"uses_cache": False},
}
PROMPT = 'def read_lines(path):\n    """'
WARMUP_TOKENS = 8


def measure(load: Path, prompt: str, side: str, lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """The model of one side in words, and for each number of tokens the seconds of every round."""
    cpu_patches.install()
    from megafp8.training.generation import generate_text
    from megafp8.training.language_model import load_language_model
    from megafp8.training.sampling import GREEDY

    model = load_language_model(load, **SIDES[side])
    model.tokenizer.eod = -1

    def seconds(num_tokens: int) -> float:
        start = time.perf_counter()
        generate_text(model, prompt, GREEDY, num_tokens, seed=1, show=len)
        return time.perf_counter() - start

    seconds(WARMUP_TOKENS)
    return {"model": str(model), "seconds": {str(n): [seconds(n) for _ in range(rounds)] for n in lengths}}


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=Path, required=True, help="folder that a run had as --save")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, nargs="+", default=[120, 240])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    results = {}
    for side in SIDES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            parts = (options.load, options.prompt, side, options.tokens, options.rounds)
            results[side] = pool.apply(measure, parts)
        print(f"{side}: {results[side]['model']}", file=sys.stderr)
    rows = []
    for side, result in results.items():
        medians = {n: statistics.median(result["seconds"][str(n)]) for n in options.tokens}
        rows.append([side, *(text for n, s in medians.items() for text in (f"{s:.2f}", f"{n / s:.0f}"))])
    print(markdown_table(["", *(text for n in options.tokens for text in (f"{n} tokens, s", "tokens/s"))], rows))
    if options.json is not None:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
