"""The processes in which micro batch sizes are tried, one beside each rank; `trial.py` is what runs in them.

They form groups of their own. Within the ranks it would not be safe: a rank that runs out of memory in the middle of a
step leaves the others in a collective that never ends, and a communicator that was broken off cannot be used again. A
process can be killed, whatever its communicators wait for, and with it goes all that a trial leaves behind: cached and
fragmented device memory, optimizer state, random state, scales. What a rank itself holds meanwhile, a CUDA context and
a communicator, is missing in the trials and there for the run.
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

from megafp8.device.collective_errors import call_on_all_ranks, on_rank_0
from megafp8.device.platform import world_size
from megafp8.training.micro_batch_search import trial
from megafp8.training.micro_batch_search.messages import EXCEEDED, Answer, Failed, Measured, TooLarge, TrialSetup

POLL_S = 0.1
# For a process that ends by itself when the others' trial is called off.
LAST_WORDS_S = 1.0
CALLED_OFF = "called off"


def worst(answers: Sequence[Answer]) -> Answer:
    """The answer that explains the others, where not all went well.

    Lack of memory on one rank shows as a broken connection on others. An error that is one will be there in the next
    size, too.
    """
    too_large = [each for each in answers if isinstance(each, TooLarge)]
    causes = [each for each in too_large if each.reason != CALLED_OFF]
    return next(iter(causes or [each for each in answers if isinstance(each, Failed)] or too_large))


class TrialProcess:
    """The processes in which sizes are tried, one a rank; all ranks have this and call it alike.

    New ones are started after a size that did not fit.

    Args:
        serve: what such a process does.
        timeout_s: of silence, after which a trial has failed; default the run's of collectives.
    """

    def __init__(self, setup: TrialSetup, serve: Callable[..., Any] = trial.serve, timeout_s: Optional[float] = None):
        self.setup, self.serve = setup, serve
        self.timeout_s = timeout_s or 60.0 * setup.config.parallel.distributed_timeout_minutes
        self.num_started = 0
        self.process: Any = None
        self.pipe: Any = None
        self.store: Any = None
        self.meeting: Optional[tuple[str, int]] = None
        if world_size() > 1:
            self.meet()

    def meet(self) -> None:
        """Open the store at which trials meet: on rank 0, at the address that the launcher has for it."""
        host = os.environ.get("MASTER_ADDR", "localhost")

        def open_store() -> tuple[str, int]:
            self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            return host, self.store.port

        def join_store() -> None:
            self.store = self.store or dist.TCPStore(*self.meeting)

        self.meeting = on_rank_0(open_store)
        call_on_all_ranks(join_store)  # an error on one rank is one on all

    def measure(self, size: int) -> Answer:
        """Try a size on all ranks: the worst answer, the same on all."""
        if self.process is None:
            self.start()
        answer = self.ask(size)
        if not isinstance(answer, Measured):
            self.call_off()
        answers = call_on_all_ranks(lambda: answer)
        if all(isinstance(each, Measured) for each in answers):
            return Measured(max(each.peak_bytes for each in answers), max(each.ms_per_sample for each in answers))
        self.close()
        return worst(answers)

    def start(self) -> None:
        """Start this rank's process."""
        call_on_all_ranks(lambda: None)  # a device has room again only when the others' old processes are gone, too
        self.num_started += 1
        setup = dataclasses.replace(self.setup, meeting=self.meeting, name=f"trials{self.num_started}")
        context = multiprocessing.get_context("spawn")  # a forked one could not use CUDA, nor forget torch.distributed
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=self.serve, args=(setup, theirs), daemon=True)
        call_on_all_ranks(self.process.start)
        theirs.close()

    def ask(self, size: int) -> Answer:
        """This rank's answer, or why there is none."""
        deadline = time.monotonic() + self.timeout_s
        try:
            self.pipe.send(size)
            while not self.pipe.poll(POLL_S):
                if self.is_called_off() and not self.pipe.poll(LAST_WORDS_S):
                    return TooLarge(CALLED_OFF)
                if time.monotonic() > deadline:
                    return Failed(f"no answer in {self.timeout_s:g} s")
            return self.pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return self.death()
        except Exception:
            return Failed(traceback.format_exc())

    def death(self) -> Answer:
        """What the end of a process that gave no answer means."""
        self.process.join()
        status = self.process.exitcode
        if status == EXCEEDED:
            return TooLarge("the process grew beyond the limit")
        if status == -signal.SIGKILL:
            return TooLarge("the process was killed, as the system does when memory is short")
        return Failed(f"the process ended with status {status}")

    def call_off(self) -> None:
        """Tell the ranks whose trials wait for this one's."""
        if self.store is not None:
            self.store.set(f"called off {self.num_started}", "1")

    def is_called_off(self) -> bool:
        """Whether another rank's trial did not go well."""
        return self.store is not None and self.store.check([f"called off {self.num_started}"])

    def close(self) -> None:
        """End the process, whatever it waits for."""
        if self.process is not None:
            if self.process.pid is not None:  # else it could not be started
                self.process.kill()
                self.process.join()
            self.pipe.close()
            self.process = None
