"""With --optimizer muon every layout trains the model of one rank, in FP32, unless each shard is a matrix."""

from __future__ import annotations

import functools

import pytest
from ranks import run_ranks
from small_run import PLAIN, VIRTUAL, Curve, build_run, layers_of, small_config, train
from tolerances import LAYOUT_GRAD_NORM, LAYOUT_LOSS

from megafp8.config.schema import RunConfig
from megafp8.training.extensions.replica_check import check_replicas

NUM_STEPS = 5
MUON = f"{PLAIN} --optimizer muon --muon-fp32-matmul-prec highest --muon-extra-scale-factor 0.2"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-token-dispatcher-type alltoall "
    "--micro-batch-size 2"
)
TENSOR, SEQUENCE = "--tensor-model-parallel-size 2", "--sequence-parallel"
DISTRIBUTED, BLOCKS = "--muon-tp-mode distributed", "--muon-tp-mode blockwise"
PIPELINE = "--pipeline-model-parallel-size 2 --micro-batch-size 2"
LAYER_WISE = "--use-distributed-optimizer"
EP2 = "--expert-model-parallel-size 2"
MODELS = {"llama": ("llama", ""), "gpt2": ("gpt2", ""), "mixture": ("llama", EXPERTS)}
CASES = {
    "llama-tp2": ("llama", 2, TENSOR),
    "gpt2-tp2": ("gpt2", 2, TENSOR),
    "llama-tp2-distributed-sp": ("llama", 2, f"{TENSOR} {SEQUENCE} {DISTRIBUTED}"),
    "llama-pp2": ("llama", 2, PIPELINE),
    "gpt2-pp2-virtual2": ("gpt2", 2, VIRTUAL),
    "llama-dp2": ("llama", 2, ""),
    "llama-dp2-layer-wise": ("llama", 2, LAYER_WISE),
    "llama-cp2": ("llama", 2, "--context-parallel-size 2"),
    "llama-tp2-pp2-distributed": ("llama", 4, f"{TENSOR} {PIPELINE} {DISTRIBUTED}"),
    "gpt2-pp2-dp2-layer-wise": ("gpt2", 4, f"{PIPELINE} {LAYER_WISE}"),
    "mixture-ep2": ("mixture", 2, EP2),
    "mixture-tp2": ("mixture", 2, f"{TENSOR} {SEQUENCE}"),
    "mixture-ep2-tp2-layer-wise": ("mixture", 4, f"{EP2} {TENSOR} {SEQUENCE} {LAYER_WISE}"),
    "mixture-ep2-tp2-etp1": ("mixture", 4, f"{EP2} {TENSOR} {SEQUENCE} --expert-tensor-parallel-size 1"),
}


def train_and_compare_replicas(config: RunConfig) -> Curve:
    run = build_run(config)
    curve = train(run, NUM_STEPS)
    check_replicas(run, NUM_STEPS)
    return curve


def curves(model: str, world_size: int, flags: str = "") -> list[Curve]:
    style, model_flags = MODELS[model]
    return run_ranks(
        world_size, train_and_compare_replicas, small_config(style, f"{MUON} {model_flags} {flags}", world_size)
    )


@functools.cache
def one_rank(model: str, layers: str = "") -> Curve:
    return curves(model, 1, layers)[0]


@pytest.mark.parametrize("case", CASES)
def test_a_layout_follows_one_rank(case: str) -> None:
    model, world_size, flags = CASES[case]
    found, expected = curves(model, world_size, flags), one_rank(model, layers_of(flags))
    assert all(curve == found[0] for curve in found), "ranks report different numbers"
    assert found[0].losses == pytest.approx(expected.losses, abs=LAYOUT_LOSS, rel=0)
    assert found[0].grad_norms == pytest.approx(expected.grad_norms, rel=LAYOUT_GRAD_NORM[MODELS[model][0]])


def test_each_shard_may_be_a_matrix() -> None:
    """Blocks are orthogonalized one by one: another training, which the tests above must tell apart."""
    blocks, expected = curves("llama", 2, f"{TENSOR} {BLOCKS}")[0], one_rank("llama")
    distances = [abs(a - b) for a, b in zip(blocks.losses, expected.losses, strict=True)]
    assert distances[0] <= LAYOUT_LOSS < 1e-3 < max(distances) < 0.5
