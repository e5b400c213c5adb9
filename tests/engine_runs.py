"""Runs of the training command in one process: `python tests/engine_runs.py FILE`, with the runs of a JSON file.

A run is a list of the number of ranks and the command line. The process ends with the output of the first that fails.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from forked_runs import prepare, run_forked

Runs = Sequence[tuple[int, Sequence[str]]]


def failure_of(runs: Runs) -> Optional[str]:
    """Run all; the command line and output of the first that fails, None if none does."""
    prepare()
    for world_size, flags in runs:
        ended = run_forked(world_size, flags, timeout_s=180.0)
        if any(ended.statuses):
            return f"{' '.join(flags)}\n{ended.report()}"
    return None


if __name__ == "__main__":
    sys.exit(failure_of(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
