"""Steps of two and four ranks as CUDA graphs have the losses and bytes of separately launched kernels, bitwise.

A graph holds the messages between pipeline stages, between context-parallel ranks, and of the gradient reduction.
Mixtures with expert-parallel ranks are no graphs (`test_nccl.py` has them). The runs of this file are started once,
concurrently (`side_by_side.py`); with `-k` only those that the chosen tests compare.
"""

from __future__ import annotations

from typing import Optional

import pytest
import torch
from gpu_sizes import RECIPES, SIZES
from requirements import require_transformer_engine
from side_by_side import Launch, run_all, run_folder

from megafp8.analysis.runs import load_run
from megafp8.metrics.records import QuantizationRecord
from megafp8.resilience.watchdog import STACKS_FOLDER

NUM_GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.gpu
require_transformer_engine(num_gpus=2)

STEPS = 10  # of statistics steps, the second after the capture is replayed
# A step that hangs ends its run, and every rank writes its stacks. The first step has five times as long.
RUN = (
    f"--bf16 --micro-batch-size 2 --train-iters {STEPS} --eval-iters 0 --no-save-optim --no-save-rng "
    "--log-interval 1 --deterministic-mode --step-timeout-s 12"
)
KERNELS = {"launched": "--cuda-graph-impl none", "graph": "--cuda-graph-impl local --cuda-graph-warmup-steps 2"}
PP2, CP2 = "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
INTERLEAVED = f"{PP2} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PP4, TP2 = "--pipeline-model-parallel-size 4 --num-layers 4", "--tensor-model-parallel-size 2 --sequence-parallel"
DELAYED, FUSER = RECIPES["delayed"], "--use-transformer-engine-op-fuser"
# Mock documents have 2,048 tokens, on average. cuDNN's deterministic kernels take memory for documents x length^2.
DOCUMENTS = "--reset-attention-mask --eod-mask-loss --seq-length 1024"
EMULATED = "--transformer-impl emulated"
STATISTICS = "--fp8-log-interval 2 --fp8-what-if mxfp8,nvfp4"
CODES = "--overlap-grad-reduce --overlap-param-gather --grad-reduce-in-fp8"
# By name: the number of ranks, and the flags.
LAYOUTS = {
    "pipeline bf16": (2, PP2),
    "pipeline delayed": (2, f"{PP2} {DELAYED}"),
    "pipeline fused delayed": (2, f"{PP2} {DELAYED} {FUSER}"),
    "pipeline tied delayed": (2, f"{PP2} {DELAYED}"),
    "pipeline recomputed delayed": (2, f"{PP2} {DELAYED} {FULL}"),
    "interleaved bf16": (2, INTERLEAVED),
    "interleaved delayed": (2, f"{INTERLEAVED} {DELAYED}"),
    "context bf16": (2, CP2),
    "context delayed": (2, f"{CP2} {DELAYED}"),
    "context fused delayed": (2, f"{CP2} {DELAYED} {FUSER}"),
    "context documents bf16": (2, f"{CP2} {DOCUMENTS}"),
    "context exchanged documents bf16": (2, f"{CP2} --cp-comm-type a2a {DOCUMENTS}"),
    "data statistics delayed": (2, f"{DELAYED} {STATISTICS}"),
    "tensor statistics tensorwise": (2, f"{TP2} {RECIPES['tensorwise']} {STATISTICS}"),
    "pipeline statistics delayed": (2, f"{PP2} {DELAYED} {STATISTICS}"),
    "data codes": (2, CODES),
    "data codes delayed": (2, f"{CODES} --grad-reduce-fp8-scaling tensor {DELAYED}"),
    "data codes feedback": (2, f"{CODES} --grad-reduce-fp8-error-feedback"),
    "data emulated delayed": (2, f"{DELAYED} {EMULATED}"),
    "data emulated nvfp4": (2, f"--fp4-format e2m1 --fp4-recipe nvfp4 {EMULATED}"),
    "fsdp2 FP8 weights": (
        2,
        f"--no-use-distributed-optimizer --use-torch-fsdp2 --no-gradient-accumulation-fusion {RECIPES['tensorwise']} "
        "--fp8-param-gather",
    ),
    "data O2": (2, "--overlap-grad-reduce --fp8-lm-level O2"),
    "pipeline 4 bf16": (4, PP4),
    "pipeline 4 delayed": (4, f"{PP4} {DELAYED}"),
    "pipeline 2 data 2 delayed": (4, f"{PP2} {DELAYED}"),
    "tensor 2 pipeline 2 delayed": (4, f"{TP2} {PP2} {DELAYED}"),
    "tensor 2 data 2 delayed": (4, f"{TP2} {DELAYED}"),
    "context 2 data 2 delayed": (4, f"{CP2} {DELAYED}"),
}
Step = tuple[float, Optional[int], Optional[int], Optional[QuantizationRecord]]
"""Loss, the bytes of weights and gradients that rank 0 received, and the statistics of a statistics step.

In runs with statistics no bytes."""
FITTING = {name: layout for name, layout in LAYOUTS.items() if layout[0] <= NUM_GPUS}


def sizes(name: str) -> str:
    """The model; tied stages share the weights of embedding and output layer, and reduce their gradients."""
    return SIZES.replace("--untie-embeddings-and-output-weights", "") if "tied" in name else SIZES


def launches(names: list[str]) -> list[Launch]:
    """Each with kernels and as a graph.

    Context-parallel runs that share two GPUs do not end: the ring waits for both ranks of a run to be on their GPUs.
    Runs of four ranks are alone too.
    """
    found = []
    for name in names:
        num_ranks, layout = LAYOUTS[name]
        for kernels, flags in KERNELS.items():
            text = f"{sizes(name)} {RUN} {layout} {flags}"
            found.append(
                Launch(name=f"{name} {kernels}", num_ranks=num_ranks, flags=text, alone=num_ranks > 2 or CP2 in layout)
            )
    return found


@pytest.fixture(scope="module")
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Step]]:
    """Of every run that succeeded, by its name; the output of others is printed."""
    items = [item for item in request.session.items if item.module is request.module]
    chosen = [name for name in FITTING if any(item.callspec.params["name"] == name for item in items)]
    folder = tmp_path_factory.mktemp("graphs")
    ends = run_all(folder, launches(chosen), NUM_GPUS)
    found = {}
    for name, end in ends.items():
        print(f"\n{name}: {end.statuses} in {end.seconds:.1f} s")
        if set(end.statuses) == {0}:
            run = load_run(run_folder(folder, name))
            statistics = {record.step: record for record in run.quantization_records}
            # After a statistics step, which gathers all weights, a step that may be captured gathers them again.
            has_bytes = not statistics
            found[name] = [
                (step.loss, has_bytes and step.param_gather_bytes, has_bytes and step.grad_reduce_bytes,
                 statistics.get(step.step))
                for step in run.steps
            ]  # fmt: skip
        else:
            print(end.output[-6000:])
            for stacks in sorted((run_folder(folder, name) / STACKS_FOLDER).glob("*")):
                print(f"{stacks.name}:\n{stacks.read_text()[:3000]}")
    return found


@pytest.mark.parametrize("name", FITTING)
def test_graphs_of_ranks_equal_launched_kernels(steps: dict[str, list[Step]], name: str) -> None:
    launched, graph = steps.get(f"{name} launched"), steps.get(f"{name} graph")
    assert launched is not None and len(launched) == STEPS and launched[-1][0] < launched[0][0], launched
    assert graph == launched and ("statistics" in name) == (launched[-1][-1] is not None)
