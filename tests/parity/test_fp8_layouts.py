"""FP8 and FP4 under every layout, with scales that do not depend on the layout (`--fp8-amax-reduction all`).

Rounding to few bits turns last-bit differences into visible ones, so the bound comes from the model: how far its curve
moves when its weights move by one unit in the last place. The tests that compare the bounds with the models are long.
Tensorwise scaling is tested in every layout, the other recipes in layouts that split matrices or layers. The last tests
measure the cost of the default amax reduction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import pytest
import small_run
from ranks import run_ranks
from small_run import (
    FOUR_LAYERS,
    PLAIN,
    STYLES,
    VIRTUAL,
    Curve,
    build_run,
    curve_of,
    layers_of,
    nudge,
    small_config,
    train,
)
from test_layouts import CONTEXT, OVERLAP, PIPELINE, SEQUENCE, TENSOR
from tolerances import FP8_LAYOUT_LOSS, LAYOUT_GRAD_NORM, LAYOUT_LOSS, OTHER_SCALES, SUMMED_ELSEWHERE

from megafp8.config.schema import RunConfig

# One micro-batch size for all layouts: a tensor has one scale, so FP8 depends on its content.
FP8 = f"{small_run.FP8} --micro-batch-size 2"
TE_SCALES = "--micro-batch-size 4 --fp8-amax-reduction te"
# With this shape, blocks of 128 do not cross the boundary of two ranks.
BLOCKS_OF_128 = "--num-layers 2 --hidden-size 128 --kv-channels 64 --ffn-hidden-size 256 --micro-batch-size 8"
RECIPES = {
    "delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max",
    "blockwise": f"--fp8-format e4m3 --fp8-recipe blockwise {BLOCKS_OF_128}",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1",
}
STAGES = "--pipeline-model-parallel-size 2"
NUM_STEPS = 4
NUM_NUDGES = 8  # which of them flip a code depends on the kernels of the CPU, and with two or four none may

Nudged = tuple[Curve, list[Curve]]


def nudged_curves(config: RunConfig, num_steps: int, num_nudges: int = 4) -> Nudged:
    """The unchanged training, and trainings from weights that differ by one unit in the last place."""

    def nudged(seed: int) -> Curve:
        run = build_run(config)
        nudge(run, seed)
        return train(run, num_steps)

    curve = run_ranks(1, curve_of, config, num_steps)[0]
    return curve, [run_ranks(1, nudged, seed)[0] for seed in range(1, num_nudges + 1)]


@pytest.fixture(scope="module")
def fp8_on_one_rank() -> Callable[..., Nudged]:
    """By style, flags and number of nudges."""

    @functools.cache
    def nudged(style: str, flags: str = FP8, num_nudges: int = 0) -> Nudged:
        return nudged_curves(small_config(style, flags), NUM_STEPS, num_nudges)

    return nudged


def distance(ours: Curve, reference: Curve) -> float:
    """Root mean square of the difference of two loss curves."""
    squares = [(a - b) ** 2 for a, b in zip(ours.losses, reference.losses, strict=True)]
    return (sum(squares) / len(squares)) ** 0.5


def largest(differences: Iterable[float]) -> float:
    """By absolute value."""
    return max(map(abs, differences))


@pytest.mark.long
def test_fp8_bound_matches_the_sensitivity_of_the_models(fp8_on_one_rank: Callable[..., Nudged]) -> None:
    """The larger of the two, which have one bound: on some CPUs few nudges of one of them flip a code."""
    curves = [fp8_on_one_rank(style, num_nudges=NUM_NUDGES) for style in STYLES]
    sensitivity = max(distance(other, curve) for curve, nudged in curves for other in nudged)
    bound = FP8_LAYOUT_LOSS["tensorwise"]
    assert bound / 10 < sensitivity < bound, "neither loose nor below what rounding does"


@pytest.mark.long
@pytest.mark.parametrize("style", STYLES)
def test_plain_bounds_match_the_sensitivity_of_the_model(style: str) -> None:
    """The same for the bounds of the layouts without FP8, over 20 steps of the model that moves most."""
    curve, nudged = nudged_curves(small_config(style, f"{PLAIN} {FOUR_LAYERS}"), 20)
    losses = largest(a - b for other in nudged for a, b in zip(other.losses, curve.losses, strict=True))
    assert LAYOUT_LOSS / 10 < losses < LAYOUT_LOSS
    norms = largest(a / b - 1 for other in nudged for a, b in zip(other.grad_norms, curve.grad_norms, strict=True))
    assert LAYOUT_GRAD_NORM[style] / 10 < norms < LAYOUT_GRAD_NORM[style]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", id="dp2"),
        pytest.param(OVERLAP, id="dp2-distributed-optimizer-overlap"),
        pytest.param(PIPELINE, id="pp2"),
        pytest.param(VIRTUAL, id="pp2-virtual2"),
        pytest.param(CONTEXT, id="cp2"),
    ],
)
def test_layouts_without_split_matrices_follow_one_rank(
    style: str, flags: str, fp8_on_one_rank: Callable[..., Nudged]
) -> None:
    """The first loss is equal up to the summation order of tokens, the gradients up to their summation order."""
    layers = layers_of(flags)
    reference, _ = fp8_on_one_rank(style, f"{FP8} {layers}".strip())
    curve = run_ranks(2, curve_of, small_config(style, f"{FP8} {flags}", 2), NUM_STEPS)[0]
    assert abs(curve.losses[0] - reference.losses[0]) <= SUMMED_ELSEWHERE
    assert distance(curve, reference) <= FP8_LAYOUT_LOSS["tensorwise"]


@pytest.mark.parametrize(
    ("style", "world_size", "flags"),
    [
        pytest.param("llama", 2, TENSOR, id="llama-tp2"),
        pytest.param("gpt2", 2, TENSOR, id="gpt2-tp2"),
        pytest.param("llama", 2, f"{TENSOR} {SEQUENCE}", id="llama-tp2-sp"),
        pytest.param("gpt2", 2, f"{TENSOR} {SEQUENCE}", id="gpt2-tp2-sp"),
        pytest.param("llama", 4, f"{TENSOR} {PIPELINE} {SEQUENCE}", id="llama-tp2-pp2-sp"),
        pytest.param("gpt2", 4, f"{TENSOR} {PIPELINE} {SEQUENCE}", id="gpt2-tp2-pp2-sp"),
        pytest.param("llama", 4, f"{TENSOR} {CONTEXT} {SEQUENCE}", id="llama-tp2-cp2-sp"),
    ],
)
def test_layouts_with_split_matrices_follow_one_rank(
    style: str, world_size: int, flags: str, fp8_on_one_rank: Callable[..., Nudged]
) -> None:
    reference, _ = fp8_on_one_rank(style)
    curve = run_ranks(world_size, curve_of, small_config(style, f"{FP8} {flags}", world_size), NUM_STEPS)[0]
    assert distance(curve, reference) <= FP8_LAYOUT_LOSS["tensorwise"]


@pytest.mark.parametrize("precision", [FP8, f"{FP8} --bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize("style", STYLES)
def test_recomputation_is_bit_equal(style: str, precision: str) -> None:
    dropout = "--attention-dropout 0.1 --hidden-dropout 0.1"
    plain = run_ranks(1, curve_of, small_config(style, f"{precision} {dropout}"), 3)[0]
    for recompute in (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-activations",
    ):
        assert run_ranks(1, curve_of, small_config(style, f"{precision} {dropout} {recompute}"), 3)[0] == plain


@pytest.mark.parametrize("style", STYLES)
def test_fp8_changes_the_loss(style: str, fp8_on_one_rank: Callable[..., Nudged]) -> None:
    """Quantization changes the loss: the tests above compare FP8 with FP8."""
    curve, _ = fp8_on_one_rank(style)
    plain = run_ranks(1, curve_of, small_config(style, PLAIN), NUM_STEPS)[0]
    assert 20 * LAYOUT_LOSS < distance(curve, plain) < 0.05


def layout_free(recipe: str) -> str:
    """The flags of a recipe whose scales do not depend on the layout."""
    return f"--micro-batch-size 4 --fp8-amax-reduction all {RECIPES[recipe]}"


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_other_recipes_bounds_match_the_sensitivity_of_the_model(
    recipe: str, fp8_on_one_rank: Callable[..., Nudged]
) -> None:
    curve, nudged = fp8_on_one_rank("llama", layout_free(recipe), NUM_NUDGES)
    sensitivity = max(distance(other, curve) for other in nudged)
    assert FP8_LAYOUT_LOSS[recipe] / 10 < sensitivity < FP8_LAYOUT_LOSS[recipe]


@pytest.mark.parametrize("flags", [TENSOR, f"{TENSOR} {SEQUENCE}", STAGES], ids=["tp2", "tp2-sp", "pp2"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_other_recipes_follow_one_rank(recipe: str, flags: str, fp8_on_one_rank: Callable[..., Nudged]) -> None:
    """The forward pass of the first step rounds as on one rank: its scales are equal, and few sums differ."""
    reference, _ = fp8_on_one_rank("llama", layout_free(recipe))
    curve = run_ranks(2, curve_of, small_config("llama", f"{layout_free(recipe)} {flags}", 2), NUM_STEPS)[0]
    assert distance(curve, reference) <= FP8_LAYOUT_LOSS[recipe]


@pytest.mark.parametrize(
    "recipe",
    ["--fp8-format hybrid --fp8-recipe tensorwise", "--fp8-format e4m3 --fp8-recipe rowwise", "--fp4-format e2m1"],
)
def test_scales_of_shards_are_as_accurate_as_scales_of_full_tensors(recipe: str) -> None:
    """The default: each tensor-parallel rank scales its shard, as in Transformer Engine."""
    whole = run_ranks(1, curve_of, small_config("llama", f"{TE_SCALES} {recipe}"), NUM_STEPS)[0]
    shards = run_ranks(2, curve_of, small_config("llama", f"{TE_SCALES} {recipe} {TENSOR}", 2), NUM_STEPS)[0]
    exact = run_ranks(1, curve_of, small_config("llama", f"{PLAIN} --micro-batch-size 4"), NUM_STEPS)[0]
    # Rowwise scales are powers of two. Another one changes a code only where it underflows, which may not occur here.
    assert distance(shards, whole) > 0 or "rowwise" in recipe
    assert distance(shards, whole) <= OTHER_SCALES * distance(whole, exact)
