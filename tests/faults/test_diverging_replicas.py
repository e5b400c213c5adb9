"""One bit of one rank's replica differs: it is detected, and the rank and the tensor are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from nonfinite_runs import run_loop
from ranks import run_ranks
from small_run import FP8, PLAIN, VIRTUAL, build_run, small_config, train
from torch import Tensor

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.directory import complete_steps
from megafp8.errors import NumericsError
from megafp8.quantization.delayed_scaling import DelayedState
from megafp8.quantization.fp8_parameter import quantized_parameters
from megafp8.training.extensions.replica_check import check_replicas
from megafp8.training.run import Run

OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
TENSOR = "--tensor-model-parallel-size 2"
GATHER = f"--bf16 {FP8} --use-distributed-optimizer --fp8-param-gather"
DELAYED = "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-delayed-start te"


def flip(tensor: Tensor) -> None:
    """Change the lowest bit of a tensor's last element."""
    tensor.detach().reshape(-1).view(torch.uint8)[-tensor.element_size()] ^= 1


def last_layer(run: Run) -> torch.nn.Module:
    return unwrap_model(run.training_state.chunks)[-1].decoder.layers[-1]


def weight(run: Run) -> Tensor:
    return last_layer(run).mlp.linear_fc2.weight


def norm(run: Run) -> Tensor:
    return last_layer(run).pre_mlp_layernorm.weight


def master(run: Run) -> Tensor:
    return weight(run).main_param


def codes(run: Run) -> Tensor:
    return quantized_parameters(run.training_state.chunks)[-1].codes.raw


def scales(run: Run) -> Tensor:
    return quantized_parameters(run.training_state.chunks)[-1].codes.dequant_scale


def delayed_scale(run: Run) -> Tensor:
    return [module for module in run.training_state.chunks[0].modules() if isinstance(module, DelayedState)][
        -1
    ].quant_scale


def compared(flags: str, world_size: int, bad_rank: int | None, find: Callable[[Run], Tensor]) -> list[str]:
    """What each rank reports after two steps, once one bit of a rank was flipped."""
    config = small_config("llama", flags, world_size)

    def compare() -> str:
        run = build_run(config)
        train(run, 2)
        check_replicas(run, 2)  # the change is found, and nothing else
        if dist.get_rank() == bad_rank:
            flip(find(run))
        try:
            check_replicas(run, 4)
        except NumericsError as error:
            return str(error)
        return ""

    return run_ranks(world_size, compare)


FC2, NORM = "decoder.layers.1.mlp.linear_fc2.weight", "decoder.layers.1.pre_mlp_layernorm.weight"


@pytest.mark.parametrize(
    ("world_size", "flags", "bad_rank", "find", "words"),
    [
        (2, PLAIN, 1, weight, f"data-parallel: ranks 0, 1, without a majority; first tensor: {FC2}"),
        (4, f"--bf16 {FP8} --micro-batch-size 2", 2, weight, "data-parallel: rank 2 differs from 0, 1, 3; "
         f"first tensor: {FC2}"),
        (2, "--bf16", 0, master, f"ranks 0, 1, without a majority; first tensor: master weight of {FC2}"),
        (2, f"--bf16 {FP8} {TENSOR}", 1, norm, f"tensor-parallel: ranks 0, 1, without a majority; first "
         f"tensor: {NORM}"),
        (2, GATHER, 1, codes, f"first tensor: {FC2} (codes)"),
        (2, GATHER, 1, scales, f"first tensor: {FC2} (scales)"),
        (2, DELAYED, 1, delayed_scale, "first tensor: decoder.layers.1.mlp.linear_fc2.quantizer_state.quant_scale"),
    ],
    ids=["weight-dp2", "weight-dp4", "master", "norm-tp2", "codes", "scales", "delayed"],
)  # fmt: skip
def test_one_flipped_bit_is_detected(
    world_size: int, flags: str, bad_rank: int, find: Callable[[Run], Tensor], words: str
) -> None:
    texts = compared(flags, world_size, bad_rank, find)
    assert words in texts[0] and texts == [texts[0]] * world_size
    assert (
        texts[0].startswith("step 4: replicas of the weights differ between ranks")
        and texts[0].count("-parallel: ") == 1
    )


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(2, f"--bf16 {OVERLAP}", id="dp2-overlap"),
        pytest.param(4, f"{PLAIN} {TENSOR} --sequence-parallel --context-parallel-size 2", id="tp2-cp2"),
        pytest.param(4, f"{PLAIN} {VIRTUAL}", id="pp2-virtual2-dp2"),
    ],
)
def test_equal_copies_pass_in_every_layout(world_size: int, flags: str) -> None:
    assert compared(flags, world_size, None, weight) == [""] * world_size


def test_a_run_stops_at_the_next_replica_check_without_a_save(tmp_path: Path) -> None:
    """One unit in the last place, in step 3. Weights are compared in steps 2 and 4."""
    flags = f"{PLAIN} --check-weight-hash-across-dp-replicas-interval 2 --save-interval 2 --train-iters 6"
    ended = run_loop(tmp_path, "ulp:rank=1,step=3,at=step.weights", flags)
    assert ended.error.startswith("step 4: replicas of the weights differ between ranks")
    assert complete_steps(tmp_path) == [2]
    (event,) = (event for event in load_run(tmp_path).events if event.name == "replicas differ")
    assert (event.step, event.detail) == (4, ended.error)
