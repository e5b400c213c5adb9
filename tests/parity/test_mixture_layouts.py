"""Mixtures of experts: every layout trains the model of one rank, in FP32 without quantization."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from small_run import PLAIN, Curve, assert_follows, curve_of, curve_of_equal_replicas, small_config
from tolerances import CAPACITY_BY_SCORE_GRAD_NORM, CAPACITY_BY_SCORE_LOSS, LAYOUT_GRAD_NORM, LAYOUT_LOSS

NUM_STEPS = 4
EXPERTS = (
    f"{PLAIN} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 0.2 --moe-z-loss-coeff 0.02 --micro-batch-size 2"
)
# Strong coefficients, so that a wrong factor of a loss would show.
CAPACITY = "--moe-expert-capacity-factor 0.75 --moe-token-drop-policy position"
MODELS = {
    "losses": "",
    "sequence-loss-shared-experts": (
        "--moe-router-load-balancing-type seq_aux_loss --moe-shared-expert-intermediate-size 32 "
        "--moe-shared-expert-gate --moe-layer-freq [0]*1+[1]*1"
    ),
    "expert-bias-groups": (
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-num-groups 2 --moe-router-group-topk 1 "
        "--moe-router-topk-scaling-factor 2.0"
    ),
    # By position: which of two tokens with nearly the same score is dropped, the last bit of a sum may decide.
    "capacity": CAPACITY,
    "padded-capacity": f"{CAPACITY} --moe-pad-expert-input-to-capacity",
}
BY_SCORE = "--moe-expert-capacity-factor 0.75"  # the default policy
EP2 = "--expert-model-parallel-size 2"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
# Name -> ranks, flags, models. A capacity counts the tokens of a tensor-parallel rank, and is another one with them.
DROPLESS, ALL = tuple(MODELS)[:3], tuple(MODELS)
LAYOUTS = {
    "ep2": (2, EP2, ALL),
    "ep2-allgather": (2, f"{EP2} --moe-token-dispatcher-type allgather", ("sequence-loss-shared-experts",)),
    "tp2-etp1": (2, f"{TENSOR} --expert-tensor-parallel-size 1", DROPLESS),
    "cp2": (2, "--context-parallel-size 2", ("losses",)),
    "ep2-tp2": (4, f"{EP2} {TENSOR}", DROPLESS),
    "ep2-tp2-etp1": (4, f"{EP2} {TENSOR} --expert-tensor-parallel-size 1", DROPLESS),
    "ep2-pp2": (
        4,
        f"{EP2} --pipeline-model-parallel-size 2",
        ("losses", "sequence-loss-shared-experts", "expert-bias-groups", "capacity"),
    ),
    "ep2-dp2-distributed-optimizer": (
        4,
        f"{EP2} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000",
        ("losses", "sequence-loss-shared-experts", "expert-bias-groups", "capacity"),
    ),
}
CASES = [
    pytest.param(model, world_size, flags, id=f"{model}-{name}")
    for name, (world_size, flags, models) in LAYOUTS.items()
    for model in models
]
reference: dict[str, Curve] = {}


def one_rank(model: str) -> Curve:
    if model not in reference:
        reference[model] = run_ranks(1, curve_of, small_config("llama", f"{EXPERTS} {MODELS[model]}"), NUM_STEPS)[0]
    return reference[model]


@pytest.mark.parametrize(("model", "world_size", "flags"), CASES)
def test_a_mixture_follows_one_rank(model: str, world_size: int, flags: str) -> None:
    config = small_config("llama", f"{EXPERTS} {MODELS[model]} {flags}", world_size)
    curves = run_ranks(world_size, curve_of_equal_replicas, config, NUM_STEPS)
    expected = one_rank(model)
    assert all(curve == curves[0] for curve in curves)
    assert_follows(curves[0], expected, LAYOUT_GRAD_NORM["llama"])


def test_a_capacity_by_score_follows_one_rank() -> None:
    one = run_ranks(1, curve_of, small_config("llama", f"{EXPERTS} {BY_SCORE}"), NUM_STEPS)[0]
    config = small_config("llama", f"{EXPERTS} {BY_SCORE} {EP2}", 2)
    curves = run_ranks(2, curve_of_equal_replicas, config, NUM_STEPS)
    assert curves[0] == curves[1]
    assert_follows(curves[0], one, CAPACITY_BY_SCORE_GRAD_NORM, CAPACITY_BY_SCORE_LOSS)
    by_position = one_rank("capacity").losses
    assert max(abs(a - b) for a, b in zip(one.losses, by_position, strict=True)) > 10 * CAPACITY_BY_SCORE_LOSS


def test_the_losses_change_the_training() -> None:
    """Otherwise the tests above could not tell whether they have the right strength."""
    without = run_ranks(1, curve_of, small_config("llama", f"{EXPERTS} --moe-aux-loss-coeff 0"), NUM_STEPS)[0]
    assert abs(without.losses[-1] - one_rank("losses").losses[-1]) > 100 * LAYOUT_LOSS
    assert one_rank("capacity").losses[1] != one_rank("losses").losses[1], "tokens are dropped"


def test_padding_to_the_capacity_does_not_train() -> None:
    padded, plain = one_rank("padded-capacity"), one_rank("capacity")
    assert torch.allclose(torch.tensor(padded.losses), torch.tensor(plain.losses), rtol=0, atol=LAYOUT_LOSS)
