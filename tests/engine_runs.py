"""Runs of the training command in one process: `python tests/engine_runs.py FILE`, with the runs of a JSON file.

A run is a list of the number of ranks and the command line. The process ends with the output of the first that fails.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from forked_runs import prepare, run_forked

if __name__ == "__main__":
    prepare()
    for world_size, flags in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        ended = run_forked(world_size, flags, timeout_s=180.0)
        if any(ended.statuses):
            sys.exit(f"{' '.join(flags)}\n{ended.report()}")
