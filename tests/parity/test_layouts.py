"""Every layout trains the same model: the curve of one rank, in FP32 without quantization."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from ranks import run_ranks
from small_run import (
    FOUR_LAYERS,
    PLAIN,
    STYLES,
    VIRTUAL,
    Curve,
    assert_follows,
    build_run,
    curve_of,
    fingerprint,
    layers_of,
    small_config,
    train,
    weights,
)
from tolerances import LAYOUT_GRAD_NORM, LAYOUT_LOSS

from megafp8.config.schema import RunConfig
from megafp8.mcore.process_groups import RankPosition

# A wrong gradient shows in the norm of the first step, lost state in the next ones.
NUM_STEPS = 4
TENSOR = "--tensor-model-parallel-size 2"
# Twice as many microbatches as stages, so that the schedule has a steady phase.
PIPELINE = "--pipeline-model-parallel-size 2 --micro-batch-size 2"
CONTEXT = "--context-parallel-size 2"
SEQUENCE = "--sequence-parallel"
# Small buckets, so that there is communication to overlap.
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"

# Name -> ranks and flags. The first ones are for both styles: a tied embedding, biases and learned positions are split
# or copied there.
LAYOUTS = {
    "tp2": (2, TENSOR),
    "tp2-sp": (2, f"{TENSOR} {SEQUENCE}"),
    "pp2": (2, PIPELINE),
    "pp2-virtual2": (2, VIRTUAL),
    "dp2": (2, ""),
    "dp2-distributed-optimizer-overlap": (2, OVERLAP),
    "cp2": (2, CONTEXT),
    "tp2-pp2-sp": (4, f"{TENSOR} {PIPELINE} {SEQUENCE}"),
    "recompute-full": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "recompute-attention": (1, "--recompute-granularity selective"),
}
LLAMA_LAYOUTS = {
    "pp2-virtual2-no-overlap": (2, f"{VIRTUAL} --no-overlap-p2p-communication"),
    "dp2-overlap-grad-reduce": (2, "--overlap-grad-reduce --ddp-bucket-size 20000"),
    "micro2": (1, "--micro-batch-size 2"),
    "micro8": (1, "--micro-batch-size 8"),
    "recompute-norms": (1, "--recompute-granularity selective --recompute-modules core_attn layernorm"),
    "pp2-virtual2-dp2-overlap": (4, f"{VIRTUAL} {OVERLAP} --micro-batch-size 1"),
    "tp2-cp2-sp": (4, f"{TENSOR} {CONTEXT} {SEQUENCE}"),
    "pp4": (4, f"{FOUR_LAYERS} --pipeline-model-parallel-size 4 --micro-batch-size 1"),
    "recompute-full-tp2-sp": (
        2,
        f"{TENSOR} {SEQUENCE} --recompute-granularity full --recompute-method block --recompute-num-layers 1",
    ),
    "recompute-mlp": (1, "--recompute-granularity selective --recompute-modules core_attn layernorm mlp"),
}
# Of gpt2, what does not depend on the style: nightly.
LONG = {"gpt2-dp2", "gpt2-dp2-distributed-optimizer-overlap", "gpt2-recompute-full", "gpt2-recompute-attention"}
EVERY_LAYOUT = [
    pytest.param(style, *layout, id=f"{style}-{name}", marks=[pytest.mark.long] if f"{style}-{name}" in LONG else [])
    for style in STYLES
    for name, layout in (LAYOUTS | (LLAMA_LAYOUTS if style == "llama" else {})).items()
]


CurveOf = Callable[..., Curve]


@pytest.fixture(scope="module")
def one_rank() -> CurveOf:
    """By style and flag of the layers: the training on one rank that every layout must follow."""

    @functools.cache
    def curve(style: str, layers: str = "") -> Curve:
        return run_ranks(1, curve_of, small_config(style, f"{PLAIN} {layers}"), NUM_STEPS)[0]

    return curve


@dataclass(frozen=True)
class Report:
    """One rank's results of a training, and its weights afterwards: the split ones and the replicated ones."""

    rank_position: RankPosition
    curve: Curve
    split: str
    whole: str


def train_rank(config: RunConfig) -> Report:
    """Train, then take fingerprints."""
    run = build_run(config)
    curve = train(run, NUM_STEPS)
    tensors = weights(run)
    chunks = run.training_state.chunks
    is_split = {
        f"{index}.{name.removeprefix('module.')}": parameter.tensor_model_parallel
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        if hasattr(parameter, "tensor_model_parallel")
    }
    split = {name: tensor for name, tensor in tensors.items() if is_split.get(name, False)}
    whole = {name: tensor for name, tensor in tensors.items() if name not in split}
    assert split and any("norm" in name for name in whole), "a rank has matrices, and norms besides"
    return Report(run.rank_position, curve, fingerprint(split), fingerprint(whole))


@pytest.mark.parametrize(("style", "world_size", "flags"), EVERY_LAYOUT)
def test_layout_follows_one_rank(style: str, world_size: int, flags: str, one_rank: CurveOf) -> None:
    reports = run_ranks(world_size, train_rank, small_config(style, f"{PLAIN} {flags}", world_size))
    for report in reports:
        assert report.curve == reports[0].curve, "ranks report different numbers"
    assert_follows(reports[0].curve, one_rank(style, layers_of(flags)), LAYOUT_GRAD_NORM[style])
    assert_ranks_hold_the_same(reports)


def assert_ranks_hold_the_same(reports: list[Report]) -> None:
    """Ranks of a stage agree bitwise on replicated weights, and data-parallel ranks also on split weights."""
    whole, split = defaultdict(set), defaultdict(set)
    for report in reports:
        whole[report.rank_position.pipeline_rank].add(report.whole)
        split[report.rank_position.pipeline_rank, report.rank_position.tensor_rank].add(report.split)
    assert all(len(found) == 1 for found in whole.values()), "norms and other replicated weights have diverged"
    assert all(len(found) == 1 for found in split.values()), "data-parallel ranks have drifted apart"


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(1, "--micro-batch-size 1", id="micro1"),
        pytest.param(2, "", id="dp2"),
        pytest.param(2, f"{OVERLAP} --micro-batch-size 1", id="dp2-micro1-overlap"),
        pytest.param(2, CONTEXT, id="cp2"),
        pytest.param(2, PIPELINE, id="pp2"),
        pytest.param(4, f"{VIRTUAL} --micro-batch-size 1", id="pp2-virtual2-dp2"),
    ],
)
def test_every_token_has_the_same_weight(world_size: int, flags: str) -> None:
    """Samples that count 0/8 to 7/8 of their tokens: a mean of means would weight ranks and microbatches wrongly."""
    reference = run_ranks(1, curve_of, small_config("gpt2", f"{PLAIN} {layers_of(flags)}"), 5, True)[0]
    for curve in run_ranks(world_size, curve_of, small_config("gpt2", f"{PLAIN} {flags}", world_size), 5, True):
        assert_follows(curve, reference, LAYOUT_GRAD_NORM["gpt2"])


def test_a_mask_changes_the_loss(one_rank: CurveOf) -> None:
    """Otherwise the test above could not fail."""
    masked = run_ranks(1, curve_of, small_config("gpt2", PLAIN), 1, True)[0]
    assert abs(masked.losses[0] - one_rank("gpt2").losses[0]) > 1000 * LAYOUT_LOSS


@pytest.mark.parametrize(
    ("style", "layout"),
    [pytest.param("llama", f"{TENSOR} {SEQUENCE}", id="llama-tp2-sp"), pytest.param("gpt2", TENSOR, id="gpt2-tp2")],
)
def test_recomputation_repeats_dropout(style: str, layout: str) -> None:
    """Two tensor-parallel ranks, each with its own dropout in attention and, with SP, in its part of the sequence.

    Bitwise, as the gradient norms show, except for recomputed norms, whose gradients are summed in another order.
    """
    flags = f"{PLAIN} {layout} --attention-dropout 0.1 --hidden-dropout 0.1"
    plain = run_ranks(2, curve_of, small_config(style, flags, 2), 2)
    for recompute in (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "--recompute-activations",
    ):
        assert run_ranks(2, curve_of, small_config(style, f"{flags} {recompute}", 2), 2) == plain, recompute
    norms = "--recompute-activations --recompute-modules core_attn layernorm"
    again = run_ranks(2, curve_of, small_config(style, f"{flags} {norms}", 2), 2)
    assert_follows(again[0], plain[0], LAYOUT_GRAD_NORM[style])
