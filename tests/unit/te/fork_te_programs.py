"""Runs programs of `test_te_without_cuda.py`, whose paths are lines of standard input, in forked processes.

It imports Transformer Engine for all of them. It answers each path with a line of JSON: the exit status and the output.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
import tempfile

import te_without_cuda  # noqa: F401  (first)
import transformer_engine.pytorch  # noqa: F401  (what programs import)
from forked_script import be_script

from megafp8.te import fused_mlp, layers, patches  # noqa: F401

TIMEOUT_S = 120


def main() -> None:
    """Until the end of the input."""
    gc.collect()
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
            process = multiprocessing.get_context("fork").Process(
                target=be_script, args=([line.rstrip("\n")], output, output)
            )
            process.start()
            process.join(TIMEOUT_S)
            process.kill()
            process.join()
            output.seek(0)
            print(json.dumps([process.exitcode, output.read()]), flush=True)


if __name__ == "__main__":
    main()
