"""Steps of two ranks as CUDA graphs have the losses of separately launched kernels, bitwise.

A graph holds the messages between pipeline stages and between context-parallel ranks. The runs of this file are started
once, concurrently (`side_by_side.py`); with `-k` only those that the chosen tests compare.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from gpu_sizes import RECIPES, SIZES
from side_by_side import Launch, run_all, run_folder

from megafp8.analysis.runs import load_run

NUM_GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.gpu
if importlib.util.find_spec("transformer_engine") is None or NUM_GPUS < 2:
    pytest.skip("needs Transformer Engine and two GPUs", allow_module_level=True)

STEPS = 8
RUN = (
    f"--bf16 --micro-batch-size 2 --train-iters {STEPS} --eval-iters 0 --no-save-optim --no-save-rng "
    "--log-interval 1 --deterministic-mode"
)
KERNELS = {"launched": "--cuda-graph-impl none", "graph": "--cuda-graph-impl local --cuda-graph-warmup-steps 2"}
PP2, CP2 = "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
INTERLEAVED = f"{PP2} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = {
    "pipeline bf16": PP2,
    "pipeline delayed": f"{PP2} {RECIPES['delayed']}",
    "pipeline tied delayed": f"{PP2} {RECIPES['delayed']}",
    "pipeline recomputed delayed": f"{PP2} {RECIPES['delayed']} {FULL}",
    "interleaved bf16": INTERLEAVED,
    "interleaved delayed": f"{INTERLEAVED} {RECIPES['delayed']}",
    "context bf16": CP2,
    "context delayed": f"{CP2} {RECIPES['delayed']}",
}


def sizes(name: str) -> str:
    """The model; tied stages share the weights of embedding and output layer, and reduce their gradients."""
    return SIZES.replace("--untie-embeddings-and-output-weights", "") if "tied" in name else SIZES


@pytest.fixture(scope="module")
def losses(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Of every run that succeeded, by its name; the output of others is printed."""
    items = [item for item in request.session.items if item.module is request.module]
    chosen = [name for name in LAYOUTS if any(item.callspec.params["name"] == name for item in items)]
    folder = tmp_path_factory.mktemp("graphs")
    ends = run_all(
        folder,
        [
            Launch(name=f"{name} {kernels}", num_ranks=2, flags=f"{sizes(name)} {RUN} {LAYOUTS[name]} {flags}")
            for name in chosen
            for kernels, flags in KERNELS.items()
        ],
        NUM_GPUS,
    )
    found = {}
    for name, end in ends.items():
        print(f"\n{name}: {end.statuses} in {end.seconds:.1f} s")
        if set(end.statuses) == {0}:
            found[name] = [step.loss for step in load_run(run_folder(folder, name)).steps]
        else:
            print(end.output[-6000:])
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_graphs_of_two_ranks_equal_launched_kernels(losses: dict[str, list[float]], name: str) -> None:
    launched, graph = losses.get(f"{name} launched"), losses.get(f"{name} graph")
    assert launched is not None and len(launched) == STEPS and launched[-1] < launched[0], launched
    assert graph == launched
