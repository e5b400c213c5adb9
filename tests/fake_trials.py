"""Stand-ins for the processes that try micro-batch sizes. They import no torch and behave as a test requests."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection

from megafp8.training.micro_batch_search.messages import MEMORY_EXCEEDED_STATUS, TrialResult, TrialSetup

FITS = 8
"""The largest size that a rank has room for, times its number plus 1."""


def serve(setup: TrialSetup, pipe: Connection) -> None:
    """Sizes up to `FITS` x (rank + 1) succeed. Beyond, rank 0 ends in one of several ways, and others wait for it."""
    rank = int(os.environ["RANK"])
    while True:
        size = pipe.recv()
        if size <= FITS:
            pipe.send(TrialResult(1000 * size + rank, 10.0 / size + rank))
        elif rank > 0 and setup.implementation == "breaks":
            pipe.send(TrialResult(error="RuntimeError: Connection closed by peer"))
        elif rank > 0:
            time.sleep(60)  # in a collective that rank 0 never joins
        elif setup.implementation == "raises":
            pipe.send(TrialResult(too_large="CUDA out of memory"))
            os._exit(0)
        elif setup.implementation == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif setup.implementation in ("grows", "breaks"):
            time.sleep(0.3 if setup.implementation == "breaks" else 0)
            os._exit(MEMORY_EXCEEDED_STATUS)
        elif setup.implementation == "crashes":
            os._exit(3)
        elif setup.implementation == "errs":
            pipe.send(TrialResult(error="ValueError: no"))
        else:
            time.sleep(60)
