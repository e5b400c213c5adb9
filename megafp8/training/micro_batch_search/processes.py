"""Trial processes, one for each rank, in which micro-batch sizes are measured; `trial.py` runs in them.

They have process groups of their own. The ranks themselves could not run trials: a rank that runs out of memory within
a step leaves the others in a collective that never ends, and an aborted communicator cannot be used again. A process
can be killed in any state, which also frees what a trial leaves behind: cached and fragmented device memory, optimizer
state, random state and scales. The rank holds its CUDA context and communicator during the trials.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch.distributed as dist

from megafp8.device.collective_errors import call_on_all_ranks, call_on_rank_0
from megafp8.device.platform import world_size
from megafp8.training.micro_batch_search import trial
from megafp8.training.micro_batch_search.messages import MEMORY_EXCEEDED_STATUS, TrialResult, TrialSetup

POLL_S = 0.1
# For a process that exits on its own when the trial is cancelled.
EXIT_WAIT_S = 1.0
CANCELLED = "called off"


def worst_result(results: Sequence[TrialResult]) -> TrialResult:
    """The cause where a rank has no measured numbers, else the largest ones.

    Lack of memory on one rank causes broken connections on others, so that it comes before other errors. A cancelled
    trial comes last.
    """
    too_large = [each for each in results if each.too_large and each.too_large != CANCELLED]
    errors = [each for each in results if each.error]
    cancelled = [each for each in results if each.too_large == CANCELLED]
    if causes := [*too_large, *errors, *cancelled]:
        return causes[0]
    peaks, times_ms, *_ = zip(*results, strict=True)
    return TrialResult(max(peaks), max(times_ms))


class TrialProcess:
    """This rank's trial process; all ranks call the methods together. A new process is started after a failed trial.

    Args:
        serve: the function that runs in the process.
        timeout_s: after which a trial without a result has failed; by default the timeout of the run's collectives.
    """

    def __init__(self, setup: TrialSetup, serve: Callable[..., Any] = trial.serve, timeout_s: Optional[float] = None):
        self.setup, self.serve = setup, serve
        self.timeout_s = timeout_s or 60.0 * setup.config.parallel.distributed_timeout_minutes
        self.num_started = 0
        self.process: Any = None
        self.pipe: Any = None
        self.store: Any = None
        self.store_address: Optional[tuple[str, int]] = None
        if world_size() > 1:
            self.open_store()

    def open_store(self) -> None:
        """Start the store for the rendezvous of the trial processes on rank 0, and connect the other ranks to it."""
        host = os.environ.get("MASTER_ADDR", "localhost")

        def start() -> int:
            self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            return self.store.port

        port = call_on_rank_0(start)

        def connect() -> None:
            self.store = self.store or dist.TCPStore(host, port)

        call_on_all_ranks(connect)  # raises on all ranks if one fails
        self.store_address = host, port

    def measure(self, size: int) -> TrialResult:
        """Try a size on all ranks. The result is the worst of all ranks, the same on all."""
        if self.process is None:
            self.start()
        result = self.try_size(size)
        if result.ms_per_sample is None and self.store is not None:
            self.store.set(f"called off {self.num_started}", "1")  # the trials of other ranks wait for this one's
        worst = worst_result(call_on_all_ranks(lambda: result))
        if worst.ms_per_sample is None:
            self.close()
        return worst

    def start(self) -> None:
        """Start this rank's process."""
        call_on_all_ranks(lambda: None)  # the old processes of all ranks have freed their memory
        self.num_started += 1
        setup = dataclasses.replace(
            self.setup, store_address=self.store_address, store_prefix=f"trials{self.num_started}"
        )
        context = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=self.serve, args=(setup, theirs), daemon=True)
        call_on_all_ranks(self.process.start)
        theirs.close()

    def try_size(self, size: int) -> TrialResult:
        """The result of this rank's process."""
        deadline = time.monotonic() + self.timeout_s
        try:
            self.pipe.send(size)
            while not self.pipe.poll(POLL_S):
                if self.is_cancelled() and not self.pipe.poll(EXIT_WAIT_S):
                    return TrialResult(too_large=CANCELLED)
                if time.monotonic() > deadline:
                    return TrialResult(error=f"no result within {self.timeout_s:g} s")
            return self.pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return self.exit_result()
        except Exception:
            return TrialResult(error=traceback.format_exc())

    def exit_result(self) -> TrialResult:
        """The result of a process that ended without sending one, from its exit status."""
        self.process.join()
        status = self.process.exitcode
        if status == MEMORY_EXCEEDED_STATUS:
            return TrialResult(too_large="the process exceeded the memory limit")
        if status == -signal.SIGKILL:
            return TrialResult(too_large="the process was killed, probably because the system ran out of memory")
        return TrialResult(error=f"the process exited with status {status}")

    def is_cancelled(self) -> bool:
        """Whether another rank's trial did not fit or failed."""
        return self.store is not None and self.store.check([f"called off {self.num_started}"])

    def close(self) -> None:
        """Kill the process, in whatever state it is."""
        if self.process is not None:
            if self.process.pid is not None:  # else its start failed
                self.process.kill()
                self.process.join()
            self.pipe.close()
            self.process = None
