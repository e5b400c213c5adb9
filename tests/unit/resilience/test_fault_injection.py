"""Plans of faults: their syntax, when they are triggered, and that each is triggered once."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megafp8.errors import ConfigError
from megafp8.resilience import fault_injection
from megafp8.resilience.fault_injection import FAULTS_VARIABLE, FIRED_VARIABLE, Fault, FaultPlan, read_plan


def test_a_plan_is_read() -> None:
    plan = read_plan("kill:rank=1,step=7,at=save.before_rename; sleep:at=data.wait,seconds=0.5,times=3;")
    assert plan == [
        Fault(0, "kill", "save.before_rename", rank=1, step=7), Fault(1, "sleep", "data.wait", times=3, seconds=0.5),
    ]  # fmt: skip
    assert read_plan("") == []


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("kil:at=step.begin", "'kil' is none of the kinds kill, term, stop"),
        ("kill:at=step.middle", "at=step.middle is none of the places of kill: run.start,"),
        ("kill:step=3", "at=None is none of the places"),
        ("kill:at=step.gradients", "is none of the places of kill"),
        ("nan:at=step.begin", "is none of the places of nan: step.loss, step.gradients, step.amax, step.weights"),
        ("kill:at=step.begin,when=3", "when= is none of the keys at, rank, step, times"),
        ("kill:at=step.begin,step=three", "step=three is no number"),
        ("kill:at=step.begin,rank=-1", "rank=-1 is no number"),
        ("kill:at=load.begin,step=3", "no step has begun at load.begin"),
        ("sleep:at=step.begin", "seconds= is missing"),
        ("kill:at=step.begin,factor=2", "factor= is for scale"),
    ],
)
def test_a_wrong_plan_is_refused(entry: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_plan(f"kill:at=step.begin;{entry}")
    (problem,) = caught.value.problems
    assert words in problem and repr(entry) in problem


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        read_plan("kill:at=nowhere,pid=7;stab:at=step.begin")
    assert len(caught.value.problems) == 3


def strikes(plan: FaultPlan, name: str, step: int | None = None) -> bool:
    try:
        plan.point(name, step)
    except OSError as error:
        assert error.errno == errno.EIO and f"injected at {name}" in str(error)
        return True
    return False


def plan_of(text: str, rank: int = 0, fired: Path | None = None) -> FaultPlan:
    return FaultPlan(read_plan(text), rank, fired)


def test_a_fault_is_triggered_at_its_rank_and_step() -> None:
    plan = plan_of("raise:rank=1,step=7,at=save.begin", rank=1)
    assert [strikes(plan, "save.begin", step) for step in (6, 7, 7)] == [False, True, False]
    assert not strikes(plan_of("raise:rank=1,step=7,at=save.begin", rank=0), "save.begin", 7)
    assert not strikes(plan_of("raise:rank=1,step=7,at=save.begin", rank=1), "save.end", 7)


def test_a_point_without_a_step_is_in_the_one_that_began() -> None:
    plan = plan_of("raise:step=7,at=save.mid_shard")
    assert not strikes(plan, "save.mid_shard")
    for step in (6, 7):
        plan.point("step.begin", step)
        assert strikes(plan, "save.mid_shard") == (step == 7)


def test_times() -> None:
    plan = plan_of("raise:at=data.wait,times=2")
    assert [strikes(plan, "data.wait") for _ in range(4)] == [True, True, False, False]


def test_a_triggered_fault_is_not_triggered_in_another_process(tmp_path: Path) -> None:
    """For each rank separately, and for each entry of the plan."""
    text, fired = "raise:at=data.wait,times=2;raise:at=save.begin", tmp_path / "fired"
    assert [strikes(plan_of(text, 0, fired), "data.wait") for _ in range(3)] == [True, True, False]
    assert strikes(plan_of(text, 1, fired), "data.wait")
    assert strikes(plan_of(text, 0, fired), "save.begin")
    assert len(list(fired.iterdir())) == 4
    assert [strikes(plan_of(text), "data.wait") for _ in range(3)] == [True] * 3, "without a folder nothing is recorded"


def test_full_and_sleep() -> None:
    with pytest.raises(OSError) as caught:
        plan_of("full:at=save.begin").point("save.begin")
    assert caught.value.errno == errno.ENOSPC
    began = time.monotonic()
    plan_of("sleep:at=data.wait,seconds=0.05").point("data.wait")
    assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "expected"), [("nan", "nan"), ("inf", "inf"), ("ulp", "above"), ("scale", "threefold")]
)
def test_poisons(kind: str, expected: str, dtype: torch.dtype) -> None:
    """In place, and only the given number of elements; also a parameter, without autograd's warning."""
    tensor = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype))
    before = tensor.detach().clone()
    plan_of(f"{kind}:at=step.loss" + (",factor=3" if kind == "scale" else "")).poison("step.loss", tensor)
    first = {
        "nan": torch.isnan, "inf": torch.isinf, "above": lambda value: value == 1 + torch.finfo(dtype).eps,
        "threefold": lambda value: value == 3,
    }[expected]  # fmt: skip
    assert first(tensor.detach()[0, 0])
    assert torch.equal(tensor.detach().view(-1)[1:], before.view(-1)[1:] * (3 if kind == "scale" else 1))


def run_python(code: str, plan: str, fired: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {FAULTS_VARIABLE: plan, FIRED_VARIABLE: str(fired), "RANK": "0"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


STEP = "from megafp8.resilience import fault_injection as faults\nfaults.point('step.begin', step=3)\nprint('alive')"


def test_a_process_reads_its_plan_from_the_environment(tmp_path: Path) -> None:
    """It dies at the given point, once: the same command then survives."""
    plan = "kill:rank=0,step=3,at=step.begin"
    assert run_python(STEP, plan, tmp_path).returncode == -signal.SIGKILL
    assert run_python(STEP, plan, tmp_path).stdout == "alive\n"
    assert run_python(STEP, "term:at=step.begin", tmp_path / "other").returncode == -signal.SIGTERM


def test_a_command_with_a_wrong_plan_ends_with_status_64(tmp_path: Path) -> None:
    root = Path(fault_injection.__file__).parents[2]
    code = "import sys, pretrain_gpt\nsys.exit(pretrain_gpt.main(sys.argv[1:]))"
    flags = (
        "--model-preset tiny --seq-length 8 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 64"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *flags.split()],
        env=os.environ | {FAULTS_VARIABLE: "kill:at=lunch"}, cwd=root, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 64, result.stderr
    assert "at=lunch is none of the places of kill: run.start" in result.stderr
