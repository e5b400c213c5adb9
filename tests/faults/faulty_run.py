"""The run of the fault tests: small, in FP8 with state (delayed scaling), with dropout and evaluation."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from forked_runs import Ended, ForkedRun, run_forked, started

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.directory import checkpoint_path, complete_steps
from megafp8.checkpoint.fingerprint import fingerprint

STEPS, SAVE_INTERVAL, EVAL_INTERVAL = 16, 2, 3
COMMON = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 63 --swiglu "
    "--make-vocab-size-divisible-by 16 --position-embedding-type rope --tokenizer-type NullTokenizer --mock-data "
    "--num-workers 1 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-warmup-iters 2 --eval-iters 1 "
    f"--train-iters {STEPS} --save-interval {SAVE_INTERVAL} --eval-interval {EVAL_INTERVAL} --ckpt-keep 2 "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --bf16 --fp8-format hybrid --fp8-recipe delayed "
    "--fp8-amax-history-len 4 --no-progress-bar"
)
LAYOUTS = {
    "dp2": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
    "O1": (2, "--use-distributed-optimizer --fp8-lm-level O1 --grad-reduce-fp8-error-feedback"),
    "O2": (2, "--fp8-lm-level O2"),
    "O3": (2, "--fp8-lm-level O3"),
}
# A run that loses a rank ends within this time, because the others detect it.
SOON_S = 15.0


@dataclass(frozen=True)
class FaultyRun:
    """A run's folder and flags; each `start` is one start of it."""

    layout: str
    folder: Path
    cache: Path

    @property
    def world_size(self) -> int:
        return LAYOUTS[self.layout][0]

    def start(self, plan: str = "", flags: str | None = None) -> Ended:
        """Start or resume it (unless `flags` say otherwise) under a plan of faults."""
        return run_forked(self.world_size, self.text(flags), plan, self.fired)

    def started(self, plan: str = "", flags: str | None = None) -> contextlib.AbstractContextManager[ForkedRun]:
        """The same, for a test that acts on its ranks while they run."""
        return started(self.world_size, self.text(flags), plan, self.fired)

    def text(self, flags: str | None) -> str:
        """The complete command line."""
        folders = f"--save {self.folder} --load {self.folder}" if flags is None else flags
        return f"{COMMON} {LAYOUTS[self.layout][1]} --data-cache-path {self.cache} {folders}"

    @property
    def fired(self) -> Path:
        """Folder that records triggered faults."""
        return self.folder.with_name(self.folder.name + "_fired")

    @property
    def newest(self) -> int:
        """Step of the newest checkpoint; 0 without one."""
        return max(complete_steps(self.folder), default=0)

    def fingerprint(self, step: int) -> dict[str, str]:
        """Hash of a checkpoint's content."""
        return fingerprint(checkpoint_path(self.folder, step))

    def losses(self) -> dict[int, float]:
        """The loss of each step from the last time it was trained."""
        return {record.step: record.loss for record in load_run(self.folder).steps}


def assert_died(ended: Ended) -> None:
    """A rank was killed. All ended by themselves in time, with an error, and left no process behind."""
    assert -9 in ended.statuses, ended.report()
    assert all(status not in (0, 124) for status in ended.statuses), ended.report()
    assert ended.seconds_after_first < SOON_S, ended.report()
    assert ended.num_orphans == 0, ended.report()
