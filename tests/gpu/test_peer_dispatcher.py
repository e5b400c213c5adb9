"""Expert-parallel ranks that write tokens into each other's memory, on two GPUs: the losses of the all-to-all, launched
and as a CUDA graph; a graph with too few rows; a rank that dies or stops while the other one waits for it; and ranks
that reach each other through sockets only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_sizes import RECIPES, SIZES
from requirements import require_transformer_engine
from side_by_side import End, Launch, run_all, run_folder

from benchmarks.ports import free_ports
from megafp8.analysis.runs import load_run

pytestmark = pytest.mark.gpu
require_transformer_engine(num_gpus=2)

ROOT = Path(__file__).resolve().parents[2]
STEPS = 8
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-aux-loss-coeff 0.01 --bf16 "
    f"--expert-model-parallel-size 2 --train-iters {STEPS} --eval-iters 0 --log-interval 1 "
    # With 1e-3 the loss halves in these steps, and roundings alone make a thousandth of it.
    "--micro-batch-size 2 --global-batch-size 8 --lr 3e-4 --step-timeout-s 60 "
    "--deterministic-mode"
)
OF_EXPERTS = {
    "bf16": "", "tensorwise": RECIPES["tensorwise"].replace("hybrid", "e4m3"), "delayed": RECIPES["delayed"],
    "blockwise": RECIPES["blockwise"],
}  # fmt: skip
KERNELS = {
    "alltoall": "--moe-token-dispatcher-type alltoall",
    "allgather": "--moe-token-dispatcher-type allgather",
    "peer launched": "--moe-token-dispatcher-type peer --cuda-graph-impl none",
    "peer graph": "--moe-token-dispatcher-type peer --cuda-graph-impl local --cuda-graph-warmup-steps 2",
}
DEAD, STOPPED, RESUMED = "rank that dies", "rank that stops", "resumed"
BY_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
TOLERANCE = {
    "bf16": 1e-3,
    "tensorwise": 5e-3,
    "delayed": 1e-2,
    "blockwise": 5e-3,
}  # as those of layouts in test_nccl.py
SMALL_ROOM = (
    "import runpy, sys; from megafp8.mcore import cpu_patches; cpu_patches.install(); "
    "import megafp8.models.peer_exchange as peers; peers.PEER_ROOM = 0.7; "
    "sys.argv = ['pretrain_gpt.py', *sys.argv[1:]]; runpy.run_path('pretrain_gpt.py', run_name='__main__')"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peers")


@pytest.fixture(scope="module")
def ends(folder: Path) -> dict[str, End]:
    launches = [
        # Ranks that wait inside a kernel get half of a GPU's time, and give it to nobody.
        Launch(
            name=f"{recipe} {kernels}", num_ranks=2, flags=f"{SIZES} {EXPERTS} {flags} {layout}", alone="peer" in layout
        )
        for recipe, flags in OF_EXPERTS.items()
        for kernels, layout in KERNELS.items()
    ]
    graph = f"{SIZES} {EXPERTS} {KERNELS['peer graph']}"
    saving = f"{graph} --save-interval 4"
    launches += [
        Launch(name=DEAD, num_ranks=2, flags=saving, plan="kill:rank=1,step=6,at=step.begin"),
        Launch(
            name=STOPPED,
            num_ranks=2,
            flags=f"{graph} --step-timeout-s 20",
            plan="stop:rank=1,step=6,at=step.begin",
            alone=True,
        ),
        Launch(name=RESUMED, num_ranks=2, flags=f"{saving} --load {run_folder(folder, DEAD)}", after=DEAD),
    ]
    return run_all(folder, launches, torch.cuda.device_count())


def losses(folder: Path, ends: dict[str, End], name: str) -> list[float]:
    assert set(ends[name].statuses) == {0}, ends[name].output[-4000:]
    return [step.loss for step in load_run(run_folder(folder, name)).steps]


@pytest.mark.parametrize("recipe", OF_EXPERTS)
def test_peers_train_as_the_all_to_all_does(folder: Path, ends: dict[str, End], recipe: str) -> None:
    exchanged, gathered, launched, graph = (losses(folder, ends, f"{recipe} {kernels}") for kernels in KERNELS)
    print(f"\n{recipe}: {exchanged} {gathered} {launched} {graph}")
    assert len(graph) == STEPS and graph[-1] < graph[0]
    assert gathered == pytest.approx(exchanged, rel=TOLERANCE[recipe])
    assert launched == pytest.approx(exchanged, rel=TOLERANCE[recipe])
    assert graph == launched


def command(folder: Path, words: str, *program: str, **environment: str) -> list[float]:
    """Losses of a command of its own."""
    (port,) = free_ports(1)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    ended = subprocess.run(
        [*launcher, *program, *words.split(), "--save", folder], cwd=ROOT, text=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": paths} | environment, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [step.loss for step in load_run(folder).steps]


def test_a_step_with_too_few_rows_is_repeated(folder: Path, ends: dict[str, End]) -> None:
    """Graphs with fewer rows than any step needs: a replayed step is repeated kernel by kernel."""
    words = f"{SIZES} {EXPERTS} {KERNELS['peer graph']}"
    found = command(folder / "small_room", words, "--no-python", sys.executable, "-c", SMALL_ROOM)
    assert found == losses(folder, ends, "bf16 peer launched")
    # After a repeated step two warm up again.
    assert [step.is_repeated for step in load_run(folder / "small_room").steps].count(True) >= 2


def test_ranks_that_reach_each_other_through_sockets_only(folder: Path, ends: dict[str, End]) -> None:
    """As those of two nodes without a faster network, whose tokens the all-to-all exchanges."""
    words = f"{SIZES} {EXPERTS} {OF_EXPERTS['tensorwise']} {KERNELS['alltoall']}"
    found = command(folder / "sockets", words, "pretrain_gpt.py", **BY_SOCKETS)
    assert found == pytest.approx(losses(folder, ends, "tensorwise alltoall"), rel=1e-6)


def test_a_run_resumes_after_a_rank_has_died(folder: Path, ends: dict[str, End]) -> None:
    """A resumed run begins kernel by kernel again."""
    unbroken = losses(folder, ends, "bf16 peer graph")
    assert losses(folder, ends, RESUMED) == unbroken[4:]


@pytest.mark.parametrize(("name", "said"), [(DEAD, "has ended"), (STOPPED, "is stopped")])
def test_a_lost_rank_is_named(ends: dict[str, End], name: str, said: str) -> None:
    end = ends[name]
    assert 0 not in end.statuses and end.seconds_after_first < 60
    assert "rank 1 (" in end.output and said in end.output, end.output[-4000:]
