"""A checkpoint that is written while training goes on.

Ranks agree in the training thread only, at most once a step and with one number: the threads beside it talk to no other
rank. So no collective of theirs can meet one of the training, and a rank that writes for ever is noticed by the others'
deadlines. A checkpoint is told of once it has its final name.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed as dist

from megafp8.checkpoint.host_copies import Copy, HostCopies
from megafp8.checkpoint.save import Plan, Save, Written, failure_explained, prepare_save
from megafp8.checkpoint.state import Progress, Trainee
from megafp8.checkpoint.threads import in_thread
from megafp8.checkpoint.together import together
from megafp8.config.schema import RunConfig
from megafp8.data.sample_chain import SampleMark
from megafp8.errors import CheckpointError


class BackgroundSaves:
    """Begins saves, one after the other; keeps between them what they share.

    Args:
        timeout_s: a save that takes longer has failed.
        device: on which ranks agree.
    """

    def __init__(self, config: RunConfig, trainee: Trainee, timeout_s: float, device: torch.device):
        self._config, self._trainee = config, trainee
        self._timeout_s, self._device = timeout_s, device
        self.forget()

    def forget(self) -> None:
        """Share nothing with the next save: a thread that is left behind may still read and write it."""
        self._copies = HostCopies()
        self._plan: Optional[Plan] = None

    def begin(
        self, folder: Path, progress: Progress, samples: Optional[SampleMark] = None, *, keep: Optional[int] = None
    ) -> BackgroundSave:
        """Begin a save, with the arguments of `save_checkpoint`; all ranks call it, and the one before has ended.

        Raises:
            CheckpointError: on all ranks: it cannot be begun.
        """
        with failure_explained(folder, progress.step):
            save = prepare_save(
                folder, self._config, self._trainee, progress, samples,
                keep=keep, last=self._plan, is_written_later=True,
            )  # fmt: skip
        self._plan = save.plan
        copy = Copy(save.plan.items, save.planner, self._copies)
        self._trainee.being_copied.append(lambda: copy.wait(self._timeout_s))
        return BackgroundSave(save, copy, self._timeout_s, self._device)


class BackgroundSave:
    """A save that is under way.

    Attributes:
        progress: how far the run was when it began.
    """

    def __init__(self, save: Save, copy: Copy, timeout_s: float, device: torch.device):
        self.progress = save.progress
        self._save, self._timeout_s, self._device = save, timeout_s, device
        self._deadline = time.monotonic() + timeout_s
        self._is_written = False

        def work() -> Written:
            copy.make()
            return save.write(copy.data)

        self._work: Future[Any] = in_thread(work)

    def poll(self, is_waiting: bool = False) -> Optional[Path]:
        """The checkpoint's folder if it has its name, else None; all ranks call it.

        Args:
            is_waiting: return when it has.

        Raises:
            CheckpointError: on all ranks: it could not be written, or not in time.
        """
        with failure_explained(self._save.folder, self.progress.step):
            while self._is_done_everywhere(is_waiting):
                results = together(self._result)
                if self._is_written:
                    return results[0]
                self._is_written = True
                self._work = in_thread(self._finish, results)
            return None

    def _finish(self, written: list[Written]) -> Optional[Path]:
        return self._save.finish(written) if dist.get_rank() == 0 else None

    def _is_done_everywhere(self, is_waiting: bool) -> bool:
        if is_waiting:
            wait([self._work], max(0.0, self._deadline - time.monotonic()))
        is_over = self._work.done() or time.monotonic() >= self._deadline
        flag = torch.tensor(int(is_over), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def _result(self) -> Any:
        if not self._work.done():
            self._save.permit.revoke()  # the thread goes on, when its disk answers
            raise CheckpointError(
                f"it is not written after {self._timeout_s:g} s; --async-save-timeout gives it more time"
            )
        return self._work.result()
