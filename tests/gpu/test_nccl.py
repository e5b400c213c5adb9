"""Two and four ranks under NCCL: they follow one rank, resume bitwise, stop together, and end if one is lost or hangs.

All runs of this file are started once, concurrently (`side_by_side.py`), and the tests inspect their results. Each
start is the command itself, `pretrain_gpt.py`. One more start under torchrun shows that both ways are equivalent.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gpu_sizes import FP8_RECIPES, RECIPES, SIZES
from requirements import require_transformer_engine
from side_by_side import End, Launch, run_all, run_folder

from megafp8.analysis.runs import load_run
from megafp8.resilience.run_state import current_state
from megafp8.resilience.watchdog import STACKS_FOLDER

NUM_GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.gpu
require_transformer_engine(num_gpus=2)

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
EAGER = "--cuda-graph-impl none"  # the default is a graph
# Microbatches of two sequences in every layout: scales are of the same tensors unless a rank has a part of them.
RUN = (
    f"{SIZES} --bf16 --micro-batch-size 2 --train-iters {STEPS} --eval-iters 0 --no-save-optim --no-save-rng "
    f"--log-interval 1 {EAGER}"
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
OVERLAPS = "--overlap-grad-reduce --overlap-param-gather"
W = "--fp8-param-gather"
ONE = "1 rank"
LAYOUTS = {
    "DP 2": (2, OVERLAPS),
    "TP 2": (2, TP2),
    "PP 2": (2, "--pipeline-model-parallel-size 2"),
    "DP 4": (4, OVERLAPS),
    "TP 4": (4, f"{TP2.replace('2', '4')} --make-vocab-size-divisible-by 64"),  # padded as in the other layouts
    "TP 2 PP 2": (4, f"{TP2} --pipeline-model-parallel-size 2"),
}
FITTING = {name: layout for name, layout in LAYOUTS.items() if layout[0] <= NUM_GPUS}
WORLD_SIZES = [num_ranks for num_ranks in (2, 4) if num_ranks <= NUM_GPUS]
on_four = pytest.mark.skipif(NUM_GPUS < 4, reason="needs four GPUs")
FUSED = ("bf16", "tensorwise", "blockwise")  # where operations are fused by default
FP8_WEIGHTS = [name for name in ("DP 2", "TP 2", "DP 4") if name in FITTING]
MUONS = ("delayed", "blockwise")
EXACTLY = {"": "", " FP8 weights": W}
# Relative, of any of six losses. BF16 has eight bits, and ranks sum in another order; six steps at 1e-3 propagate that.
# A code more or less, 6% to 12% apart in FP8, moves a loss as `tests/tolerances.py` says; with tensor parallelism so do
# scales, which are of a rank's part. Delayed scaling records microbatches, of which a data-parallel rank has fewer.
# Four H200s had at most 2.0e-4, 2.0e-3, 6.1e-4 and 3.0e-3; pipelines were equal to the bit. Fused operations round
# differently: two H200s had 2.8e-4, 2.1e-3, 3.2e-4 and 2.3e-3.
TOLERANCES = {"bf16": 1e-3, "tensorwise": 5e-3, "blockwise": 5e-3, "delayed": 1e-2}

GRAPH = "--cuda-graph-impl local --cuda-graph-warmup-steps 2"
WITH_GRAPH = [
    (name, flags)
    for name, flags in (("DP 2", ""), ("TP 2", ""), ("DP 4", ""), ("TP 2", f" {W}"), ("TP 4", ""))
    if name in FITTING
]

# One expert a rank. PyTorch's grouped GEMM has no E5M2.
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 0.01 --moe-grouped-gemm"
)
EP4, PP4 = f"{OVERLAPS} --expert-model-parallel-size 4", "--pipeline-model-parallel-size 4"
# Those of four ranks on models of their own, by name: the recipe, the flags of one rank too, and those of four.
OTHER_MODELS = {
    "PP 4 bf16": ("bf16", "--num-layers 4", PP4),
    "PP 4 delayed": ("delayed", f"--num-layers 4 {RECIPES['delayed']}", PP4),
    "EP 4 triton bf16": ("bf16", f"{EXPERTS} --moe-expert-kernels triton", EP4),
    "EP 4 triton delayed": (
        "delayed", f"{EXPERTS} --moe-expert-kernels triton {RECIPES['delayed'].replace('hybrid', 'e4m3')}", EP4,
    ),
    "EP 4 te bf16": ("bf16", f"{EXPERTS} --moe-expert-kernels te", EP4),
    "EP 4 te delayed": ("delayed", f"{EXPERTS} --moe-expert-kernels te {RECIPES['delayed']}", EP4),
}  # fmt: skip

LAST, HALF = 8, 4
EXACT = (
    f"{SIZES} --bf16 {RECIPES['delayed']} {OVERLAPS} --train-iters {LAST} --save-interval {HALF} --eval-iters 0 "
    f"--log-interval 1 --deterministic-mode {EAGER}"
)
OTHER_BUFFERS = {"not registered": "--no-use-nccl-ub", "small buckets": "--ddp-bucket-size 100000"}
LOOKS = f"{W} --eval-iters 2 --eval-interval 3 --fp8-log-interval 4"
KILLED_SOON_S = 15.0
# The rank that something happens to, by the number of ranks.
CHOSEN_RANK = {2: 1, 4: 2}
BAD = [(2, 0), (2, 1), *((num_ranks, CHOSEN_RANK[num_ranks]) for num_ranks in WORLD_SIZES if num_ranks > 2)]
# The first step has five times as long.
LIMITS = "--step-timeout-s 10 --checkpoint-timeout-s 60"
HANGS = {
    name: f"{kind}rank={CHOSEN_RANK[4]},step=3,at=step.begin"
    for name, kind in {"paused": "stop:", "asleep": "sleep:seconds=600,"}.items()
}


def exact(num_ranks: int) -> str:
    """One microbatch a step on every data-parallel rank."""
    return f"{EXACT} --micro-batch-size {8 // num_ranks}"


def launches(folder: Path) -> list[Launch]:
    """All runs that the tests inspect."""
    return [*exact_launches(folder), *faulty_launches(), *following_launches(), *other_launches()]


def following_launches() -> list[Launch]:
    """Runs with the losses of one rank, up to roundings, and those of one rank."""
    found = [Launch(name=f"{ONE} {recipe}", num_ranks=1, flags=f"{RUN} {flags}") for recipe, flags in RECIPES.items()]
    for name, (num_ranks, layout) in FITTING.items():
        for recipe, flags in RECIPES.items():
            found.append(Launch(name=f"{name} {recipe}", num_ranks=num_ranks, flags=f"{RUN} {flags} {layout}"))
    for name in FP8_WEIGHTS:
        num_ranks, layout = LAYOUTS[name]
        for recipe in FP8_RECIPES:
            flags = f"{RUN} {RECIPES[recipe]} {layout} {W}"
            found.append(Launch(name=f"{name} {recipe} FP8 weights", num_ranks=num_ranks, flags=flags))
    for recipe in FUSED:
        flags = f"{RUN} {RECIPES[recipe]} {OVERLAPS} --use-transformer-engine-op-fuser"
        found.append(Launch(name=f"DP 2 {recipe} fused", num_ranks=2, flags=flags))
    flags = f"{RUN} {RECIPES['delayed']} {OVERLAPS} --use-transformer-engine-op-fuser {W}"
    found.append(Launch(name="DP 2 delayed fused FP8 weights", num_ranks=2, flags=flags))
    for recipe in MUONS:
        flags = f"{RUN} {RECIPES[recipe]} --optimizer muon --muon-extra-scale-factor 0.2"
        found.append(Launch(name=f"{ONE} {recipe} muon", num_ranks=1, flags=flags))
        found.append(Launch(name=f"DP 2 {recipe} muon FP8 weights", num_ranks=2, flags=f"{flags} {W}"))
    for name, flags in WITH_GRAPH:
        num_ranks, layout = LAYOUTS[name]
        for recipe in ("bf16", "delayed") if not flags else ("delayed",):
            given = f"{RUN} {RECIPES[recipe]} {layout} {GRAPH}{flags}"
            found.append(Launch(name=f"{name} {recipe}{flags} graph", num_ranks=num_ranks, flags=given))
    return found


def other_launches() -> list[Launch]:
    """Those of `OTHER_MODELS`."""
    found = []
    for name, (_, model, layout) in OTHER_MODELS.items() if NUM_GPUS >= 4 else ():
        found.append(Launch(name=f"{ONE} of {name}", num_ranks=1, flags=f"{RUN} {model}"))
        found.append(Launch(name=name, num_ranks=4, flags=f"{RUN} {model} {layout}"))
    return found


def exact_launches(folder: Path) -> list[Launch]:
    """Runs with equal losses, to the bit."""
    found = [
        Launch(name="whole graph", num_ranks=2, flags=f"{EXACT} {GRAPH}"),
        Launch(name="looks", num_ranks=2, flags=f"{EXACT} {LOOKS}"),
        Launch(name="looks graph", num_ranks=2, flags=f"{EXACT} {LOOKS} {GRAPH}"),
        *(Launch(name=name, num_ranks=2, flags=f"{exact(2)} {flags}") for name, flags in OTHER_BUFFERS.items()),
    ]
    for num_ranks in WORLD_SIZES:
        for label, weights in EXACTLY.items():
            whole, flags = f"whole{label} {num_ranks}", f"{exact(num_ranks)} {weights}"
            again = f"{flags} --load {run_folder(folder, whole)} --ckpt-step {HALF}"
            found += [
                Launch(name=whole, num_ranks=num_ranks, flags=flags),
                Launch(name=f"resumed{label} {num_ranks}", num_ranks=num_ranks, flags=again, after=whole),
            ]
    return found


def faulty_launches() -> list[Launch]:
    """Runs in which something happens to one rank."""
    found = []
    for num_ranks in WORLD_SIZES:
        where = f"rank={CHOSEN_RANK[num_ranks]},step=3"
        for name, plan in (
            ("killed", f"kill:{where},at=step.before_update"),
            ("stopped", f"term:{where},at=step.begin"),
        ):
            found.append(Launch(name=f"{name} {num_ranks}", num_ranks=num_ranks, flags=exact(num_ranks), plan=plan))
    for num_ranks, rank in BAD:
        plan = f"nan:rank={rank},step=3,at=step.gradients"
        found.append(Launch(name=f"bad {rank} of {num_ranks}", num_ranks=num_ranks, flags=exact(num_ranks), plan=plan))
    for name, plan in HANGS.items() if NUM_GPUS >= 4 else ():
        found.append(Launch(name=name, num_ranks=4, flags=f"{exact(4)} {LIMITS}", plan=plan))
    return found


class Runs:
    """The runs, how they ended, and what they recorded."""

    def __init__(self, folder: Path, ends: Mapping[str, End]):
        self.folder, self.ends = folder, ends

    def losses(self, name: str) -> list[float]:
        """The loss of every step of a run that succeeded."""
        end = self.ends[name]
        assert set(end.statuses) == {0}, end.output
        return [step.loss for step in load_run(run_folder(self.folder, name)).steps]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("nccl")
    ends = run_all(folder, launches(folder), NUM_GPUS)
    print("\n" + "\n".join(f"{name}: {end.statuses} in {end.seconds:.1f} s" for name, end in ends.items()))
    return Runs(folder, ends)


def assert_follows(runs: Runs, name: str, recipe: str, one_rank: str = "") -> None:
    one, many = runs.losses(one_rank or f"{ONE} {recipe}"), runs.losses(name)
    gaps = [abs(a - b) / b for a, b in zip(many, one, strict=True)]
    print(f"\n{name}: largest gap {max(gaps):.2e}, at the first step {gaps[0]:.2e}")
    assert len(one) == STEPS and one[-1] < one[0], one
    assert max(gaps) < TOLERANCES[recipe], (one, many)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", FITTING)
def test_ranks_follow_one_rank(runs: Runs, layout: str, recipe: str) -> None:
    assert_follows(runs, f"{layout} {recipe}", recipe)


@pytest.mark.parametrize("recipe", FUSED)
def test_ranks_with_fused_operations_follow_one_rank_without(runs: Runs, recipe: str) -> None:
    assert_follows(runs, f"DP 2 {recipe} fused", recipe)


def test_ranks_with_fused_operations_on_fp8_weights_follow_one_rank(runs: Runs) -> None:
    assert_follows(runs, "DP 2 delayed fused FP8 weights", "delayed")


@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("layout", FP8_WEIGHTS)
def test_ranks_that_gather_fp8_weights_follow_one_rank(runs: Runs, layout: str, recipe: str) -> None:
    assert_follows(runs, f"{layout} {recipe} FP8 weights", recipe)


@pytest.mark.parametrize("recipe", MUONS)
def test_owners_that_broadcast_fp8_weights_follow_one_rank(runs: Runs, recipe: str) -> None:
    assert_follows(runs, f"DP 2 {recipe} muon FP8 weights", recipe, f"{ONE} {recipe} muon")


@pytest.mark.parametrize(("layout", "flags"), WITH_GRAPH)
def test_ranks_with_cuda_graphs_follow_one_rank_without(runs: Runs, layout: str, flags: str) -> None:
    for recipe in ("bf16", "delayed") if not flags else ("delayed",):
        assert_follows(runs, f"{layout} {recipe}{flags} graph", recipe)


@on_four
@pytest.mark.parametrize("name", OTHER_MODELS)
def test_four_ranks_of_other_models_follow_one_rank(runs: Runs, name: str) -> None:
    assert_follows(runs, name, OTHER_MODELS[name][0], f"{ONE} of {name}")


def test_cuda_graphs_of_two_ranks_equal_launched_kernels(runs: Runs) -> None:
    assert runs.losses("whole graph") == runs.losses("whole 2")


@pytest.mark.parametrize("name", OTHER_BUFFERS)
def test_buffers_change_no_loss(runs: Runs, name: str) -> None:
    assert runs.losses(name) == runs.losses("whole 2")


@pytest.mark.parametrize("graph", ["", " graph"])
def test_validation_and_statistics_steps_of_two_ranks_do_not_change_training(runs: Runs, graph: str) -> None:
    """Both gather the FP8 weights of all layers immediately, and a graph that is captured later gathers as before."""
    assert runs.losses(f"looks{graph}") == runs.losses("whole FP8 weights 2")


def test_fp8_weights_halve_the_gathered_bytes(runs: Runs) -> None:
    """Most of what stays BF16 is the embedding and the output layer: 787,712 bytes instead of 1,443,072."""
    runs.losses("DP 2 tensorwise FP8 weights")
    plain, fp8 = (
        load_run(run_folder(runs.folder, f"DP 2 tensorwise{extra}")).steps[-1].param_gather_bytes
        for extra in ("", " FP8 weights")
    )
    print(f"\ngathered in a step: {plain} bytes, with FP8 weights {fp8}")
    assert plain and fp8 and fp8 < 0.6 * plain


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("label", EXACTLY)
def test_ranks_resume_bitwise(runs: Runs, label: str, num_ranks: int) -> None:
    assert runs.losses(f"resumed{label} {num_ranks}") == runs.losses(f"whole{label} {num_ranks}")[HALF:]


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
def test_ranks_end_when_one_is_killed(runs: Runs, num_ranks: int) -> None:
    """NCCL itself would wait for the dead rank."""
    name, killed = f"killed {num_ranks}", CHOSEN_RANK[num_ranks]
    end = runs.ends[name]
    assert end.statuses[killed] == -signal.SIGKILL, end.output
    assert statuses_of_others(end, killed) == {70}, end.output
    assert end.seconds_after_first < KILLED_SOON_S, end.output
    state = current_state(run_folder(runs.folder, name))
    assert state is not None and state.state == "failed" and f"rank {killed} (" in state.reason, state


def statuses_of_others(end: End, rank: int) -> set[int]:
    return {status for other, status in enumerate(end.statuses) if other != rank}


@on_four
@pytest.mark.parametrize("name", HANGS)
def test_ranks_end_when_one_hangs(runs: Runs, name: str) -> None:
    """NCCL itself would wait for it. One that sleeps exits by itself, and its stack shows where it was; one that a
    signal has stopped is named and continued by the others, and ends as one of them or because they are gone."""
    end, folder, stuck = runs.ends[name], run_folder(runs.folder, name), CHOSEN_RANK[4]
    assert statuses_of_others(end, stuck) == {71}, end.output
    assert end.statuses[stuck] in ((70, 71) if name == "paused" else (71,)), end.output
    assert end.seconds_after_first < KILLED_SOON_S, end.output
    state = current_state(folder)
    assert state is not None and (state.state, state.exit_status) == ("failed", 71), state
    assert "hangs in step 3, for " in state.reason, state
    if name == "paused":
        assert f"rank {stuck} (process " in state.reason and "is stopped" in state.reason, state
    else:
        stacks = [(folder / STACKS_FOLDER / f"rank{rank}.txt").read_text() for rank in range(4)]
        assert [rank for rank, text in enumerate(stacks) if "fault_injection.py" in text] == [stuck], stacks


@pytest.mark.parametrize(("num_ranks", "rank"), BAD)
def test_the_rank_with_bad_gradients_is_named(runs: Runs, num_ranks: int, rank: int) -> None:
    """Derived from the reduced gradients that NCCL left. The non-finite values lie in the shards of rank 0."""
    end = runs.ends[f"bad {rank} of {num_ranks}"]
    assert end.statuses == (65,) * num_ranks, end.output
    named = [other for other in range(num_ranks) if f"  rank {other}: " in end.output]
    assert named == [rank] and f"  rank {rank}: first bad tensor: gradient of " in end.output, end.output


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
def test_a_signal_to_one_rank_stops_and_saves_all(runs: Runs, num_ranks: int) -> None:
    end = runs.ends[f"stopped {num_ranks}"]
    assert end.statuses == (75,) * num_ranks, end.output
    state = current_state(run_folder(runs.folder, f"stopped {num_ranks}"))
    assert state is not None and state.state == "preempted" and state.saved_step == state.step == 3, state


def test_torchrun_start_equals_a_direct_start(runs: Runs, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "pretrain_gpt.py", *EXACT.split(), "--save", str(tmp_path / "run")]
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=180,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert [step.loss for step in load_run(tmp_path / "run").steps] == runs.losses("whole 2")
