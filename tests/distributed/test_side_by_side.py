"""How the tests on several GPUs start their runs, tested on CPU ranks: the same program, files and results."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

from gpu_sizes import RECIPES, SIZES
from side_by_side import End, Gpus, Launch, run_all, run_folder

from megafp8.analysis.runs import load_run

STEPS, HALF = 4, 2
RUN = (
    f"{SIZES} --bf16 --hidden-size 64 --ffn-hidden-size 128 --seq-length 32 --micro-batch-size 2 --train-iters {STEPS} "
    f"--save-interval {HALF} --eval-iters 0 --log-interval 1 {RECIPES['tensorwise']}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("side")


@pytest.fixture(scope="module")
def ends(folder: Path) -> dict[str, End]:
    launches = [
        Launch(name="1 rank", num_ranks=1, flags=RUN),
        Launch(name="resumed", num_ranks=2, flags=f"{RUN} --load {run_folder(folder, 'DP 2')} --ckpt-step {HALF}",
               after="DP 2"),
        Launch(name="DP 2", num_ranks=2, flags=RUN),
        Launch(name="alone", num_ranks=2, flags=RUN, alone=True),
        Launch(name="killed", num_ranks=2, flags=RUN, plan="kill:rank=1,step=3,at=step.before_update"),
    ]  # fmt: skip
    return run_all(folder, launches, num_gpus=0)


def losses(folder: Path, ends: dict[str, End], name: str) -> list[float]:
    assert set(ends[name].statuses) == {0}, ends[name].output
    return [step.loss for step in load_run(run_folder(folder, name)).steps]


def test_runs_are_independent(folder: Path, ends: dict[str, End]) -> None:
    one, two = (losses(folder, ends, name) for name in ("1 rank", "DP 2"))
    assert len(one) == STEPS and two == pytest.approx(one, rel=1e-4)
    assert load_run(run_folder(folder, "DP 2")).info.world_size == 2
    assert losses(folder, ends, "alone") == two


def test_a_run_can_wait_for_another(folder: Path, ends: dict[str, End]) -> None:
    assert losses(folder, ends, "resumed") == losses(folder, ends, "DP 2")[HALF:]


def test_each_rank_ends_with_its_own_status(ends: dict[str, End]) -> None:
    assert ends["killed"].statuses == (70, -signal.SIGKILL), ends["killed"].output
    assert 0 < ends["killed"].seconds_after_first < 15


def test_runs_are_spread_over_the_gpus() -> None:
    gpus = Gpus(["4", "5", "6", "7"])
    assert gpus.take(2) == [0, 1] and gpus.take(2) == [2, 3] and gpus.take(4) == [0, 1, 2, 3]
    assert gpus.take(1) == [0] and gpus.take(4) is None and gpus.take(2) == [2, 3]
    gpus.give_back([0])
    assert gpus.take(4) is None, "two of them have three runs"
    gpus.give_back([2, 3])
    assert gpus.take(4) == [0, 1, 2, 3]


def test_a_run_can_have_its_gpus_alone() -> None:
    share = Launch(name="alone", num_ranks=2, flags="", alone=True).share
    gpus = Gpus(["0", "1", "2", "3"])
    assert gpus.take(1) == [0]
    assert gpus.take(2, share) == [2, 3] and gpus.take(2, share) is None and gpus.take(4) is None
    assert gpus.take(2) == [0, 1], "others share the rest"
    gpus.give_back([2, 3], share)
    assert gpus.take(4) == [0, 1, 2, 3] and gpus.take(2, share) is None
