"""A run with a bad step, a rollback, saves, validations and a signal: the order of all calls is fixed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Optional

import pytest
import torch.distributed as dist
from ranks import run_ranks
from small_run import PLAIN, build_run, small_config

from megafp8.errors import NumericsError
from megafp8.metrics.records import QuantizationRecord
from megafp8.metrics.sinks import Sinks
from megafp8.metrics.step_totals import StepTotals
from megafp8.resilience import fault_injection
from megafp8.resilience.watchdog import Watchdog
from megafp8.training import pretrain
from megafp8.training.extension import Extension, LoopState
from megafp8.training.extensions import build_extensions
from megafp8.training.extensions.statistics import StepStatistics
from megafp8.training.step import StepResult

FLAGS = (
    f"{PLAIN} --lr-warmup-iters 1 --no-progress-bar --train-iters 5 --log-interval 1 --save-interval 1 "
    "--eval-interval 2 --eval-iters 1 --check-weight-hash-across-dp-replicas-interval 1 --fp8-log-interval 2 "
    "--fp8-what-if mxfp8 --spike-policy rollback --spike-rollback-steps 1 --spike-skip-batches 1"
)
BAD_STEP, SIGNAL_STEP = 3, 4
POINTS = ("step.begin", "step.after_backward", "step.before_update", "step.after_update", "save.begin", "save.end")

START = ["record run", "record event checkpoint", "open"]
STEP_1 = [
    "before_step", "phase step", "step.begin", "step.after_backward", "step.before_update", "before_update",
    "step.after_update",
    "after_step", "record step", "phase what follows step", "record event attention",
    "phase save", "save.begin", "record event checkpoint saved", "save.end", "phase what follows step",
]  # fmt: skip
STEP_2 = [
    "before_step", "phase step", "step.begin", "step.after_backward", "step.before_update", "before_update",
    "step.after_update",
    "after_step", "record step", "phase what follows step",
    "record quantization", "phase evaluation batch", "phase what follows step", "record eval",
    "phase save", "save.begin", "record event checkpoint saved", "save.end", "phase what follows step",
]  # fmt: skip
BAD = [
    "before_step", "phase step", "step.begin", "step.after_backward",
    "recover", "record event bad numbers", "record quantization",
    "phase rollback", "record run", "record event rolled back",
    "phase save", "save.begin", "record event checkpoint saved", "save.end", "phase what follows step",
]  # fmt: skip
STEP_4 = [
    "before_step", "phase step", "step.begin", "step.after_backward", "step.before_update", "before_update",
    "step.after_update",
    "after_step", "record step", "phase what follows step",
    "record quantization",
    "phase what follows step",  # a validation that the signal ends before its first batch
    "phase save", "save.begin", "record event checkpoint saved", "save.end", "phase what follows step",
]  # fmt: skip
END = ["record event skipped", "record event stopped", "record event health", "close"]


class Recorder(Extension):
    """Records its calls. As the first extension it is called first and closed last."""

    def __init__(self, calls: list[str]):
        self.calls = calls

    def open(self, state: LoopState) -> None:
        self.calls.append("open")

    def before_step(self, state: LoopState) -> None:
        self.calls.append("before_step")

    def before_update(self, state: LoopState, totals: StepTotals) -> None:
        self.calls.append("before_update")

    def after_step(self, state: LoopState, result: StepResult) -> None:
        self.calls.append("after_step")

    def recover(self, state: LoopState, error: NumericsError) -> bool:
        self.calls.append("recover")
        return False

    def close(self, state: LoopState, error: Optional[BaseException]) -> None:
        self.calls.append("close")


def calls_of_run(folder: Path) -> list[str]:
    """The calls of a run whose third step is bad, and which receives a signal in its fourth step."""
    calls: list[str] = []
    made = fault_injection.FaultPlan(fault_injection.read_plan(f"nan:step={BAD_STEP},at=step.loss"), dist.get_rank())
    run = build_run(small_config("llama", f"{FLAGS} --save {folder} --load {folder}"))

    def point(name: str, step: Optional[int] = None) -> None:
        if name in POINTS:
            calls.append(name)
        made.point(name, step)
        if name == "step.begin" and step == SIGNAL_STEP:
            run.watchdog.record_signal(signal.SIGTERM, None)

    def write(sinks: Sinks, record: Any) -> None:
        calls.append(" ".join(["record", record.kind, getattr(record, "name", "")]).strip())
        plain_write(sinks, record)

    def enter(watchdog: Watchdog, name: str, step: Optional[int] = None) -> None:
        calls.append(f"phase {name}")

    plain_write = Sinks._pass_on
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_injection, "point", point)
        patch.setattr(fault_injection, "poison", made.poison)
        patch.setattr(Sinks, "_pass_on", write)
        patch.setattr(Watchdog, "enter", enter)
        patch.setattr(pretrain, "build_extensions", lambda: [Recorder(calls), *build_extensions()])
        pretrain.train(run)
    return calls


def test_extension_call_order(tmp_path: Path) -> None:
    (calls,) = run_ranks(1, calls_of_run, tmp_path)
    assert calls == ["phase load", *START, *STEP_1, *STEP_2, *BAD, *STEP_4, *END]


def test_the_record_is_made_while_the_next_step_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device computes the passes of the next step then, and need not wait for the host."""
    calls: list[str] = []
    plain = StepStatistics.record

    def record(*args: Any) -> QuantizationRecord:
        calls.append("record")
        return plain(*args)

    monkeypatch.setattr(StepStatistics, "record", record)
    monkeypatch.setattr(fault_injection, "point", lambda name, **_: calls.append(name))
    flags = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-amax-reduction all --fp8-log-interval 4"
    steps = f"--train-iters 5 --lr-warmup-iters 0 --eval-iters 0 --no-progress-bar --save {tmp_path}"
    config = small_config("llama", f"{steps} {flags}")

    def calls_of_run() -> list[str]:
        pretrain.train(build_run(config))
        return calls

    (calls,) = run_ranks(1, calls_of_run)
    last = calls.index("record")
    assert calls[last + 1] == "step.after_backward"
    assert calls[:last].count("step.begin") == 5
