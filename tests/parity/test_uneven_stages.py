"""Pipeline stages of different sizes train the model of one rank, and load each other's checkpoints bitwise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron.core.utils import unwrap_model
from ranks import run_ranks
from small_run import FOUR_LAYERS, FP8, PLAIN, Curve, assert_follows, build_run, curve_of, small_config, train
from tolerances import LAYOUT_GRAD_NORM, LAYOUT_LOSS

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.fingerprint import fingerprint
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.precision_map import LINEARS
from megafp8.config.schema import RunConfig
from megafp8.mcore.modules import named_linears

STEPS = 3
PIPELINE = "--pipeline-model-parallel-size 2 --micro-batch-size 2"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
SPLIT = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
GROUPS = "--micro-batch-size 1 --microbatch-group-size-per-virtual-pipeline-stage 3"
LAYOUT = "--pipeline-model-parallel-layout"
# Name -> ranks and flags.
LAYOUTS = {
    "first-1": (2, f"{PIPELINE} {FIRST} 1"),
    "last-1": (2, f"{PIPELINE} {LAST} 1"),
    "first-2-virtual": (2, f"--num-layers 6 {PIPELINE} {FIRST} 2 {CHUNKS}"),
    "split-virtual": (
        3,
        f"{SPLIT} --pipeline-model-parallel-size 3 --micro-batch-size 2 --global-batch-size 6 {CHUNKS}",
    ),
    "layout": (2, f"{PIPELINE} {LAYOUT} Et*3|tL"),
    "layout-without-layers": (2, f"{PIPELINE} {LAYOUT} E|t*4L"),
    "layout-virtual": (2, f"{PIPELINE} {LAYOUT} E|tt|t|tL"),
    "layout-virtual-loss-alone": (2, f"{PIPELINE} {LAYOUT} Et|tt|t|L --no-overlap-p2p-communication"),
    "groups-of-3-of-5": (2, f"{PIPELINE} {CHUNKS} {GROUPS} --global-batch-size 5"),
    "tp2-first-1-dp-last": (4, f"{PIPELINE} {FIRST} 1 --tensor-model-parallel-size 2 --sequence-parallel"),
    "dp2-last": (4, f"{PIPELINE} --use-tp-pp-dp-mapping --use-distributed-optimizer"),
}


def plain_flags(flags: str) -> str:
    """The flags that also change a run on one rank."""
    words = flags.split()
    selected = ("--num-layers", "--global-batch-size")
    return " ".join(f"{word} {words[index + 1]}" for index, word in enumerate(words) if word in selected)


CurveOf = Callable[[str, str], Curve]


@pytest.fixture(scope="module")
def one_rank() -> CurveOf:
    """The training on one rank that a layout must follow."""

    @functools.cache
    def curve(style: str, flags: str) -> Curve:
        return run_ranks(
            1, curve_of, small_config(style, f"{PLAIN} {FOUR_LAYERS} {flags} --micro-batch-size 1"), STEPS
        )[0]

    return curve


EVERY_LAYOUT = [
    *(("llama", layout) for layout in LAYOUTS),
    # The first and the last stage have copies of a tied embedding.
    *(("gpt2", layout) for layout in ("first-1", "layout-virtual-loss-alone", "dp2-last")),
]


@pytest.mark.parametrize(("style", "layout"), EVERY_LAYOUT)
def test_uneven_stages_follow_one_rank(style: str, layout: str, one_rank: CurveOf) -> None:
    world_size, flags = LAYOUTS[layout]
    reference = one_rank(style, plain_flags(flags))
    curves: list[Curve] = run_ranks(
        world_size, curve_of, small_config(style, f"{PLAIN} {FOUR_LAYERS} {flags}", world_size), STEPS
    )
    for curve in curves:
        assert_follows(curve, reference, LAYOUT_GRAD_NORM[style])


RESHARDED = {
    "one": (1, ""),
    "even": (2, "--pipeline-model-parallel-size 2"),
    "first-1": (2, f"--pipeline-model-parallel-size 2 {FIRST} 1"),
    "layout-virtual": (2, f"--pipeline-model-parallel-size 2 {LAYOUT} E|tt|t|tL"),
    "tp2-layout-dp-last": (
        4, f"--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --use-tp-pp-dp-mapping {LAYOUT} Et|t*3L",
    ),
}  # fmt: skip
PARTS = ("weights", "optimizer", "progress")


def config_of(layout: str) -> RunConfig:
    world_size, flags = RESHARDED[layout]
    shared = f"{PLAIN} {FOUR_LAYERS} --micro-batch-size 1 --use-distributed-optimizer"
    return small_config("llama", f"{shared} {flags}", world_size)


def run_first(config: RunConfig, folder: Path) -> list[float]:
    """Save the initial state, train, save, and continue training."""
    run = build_run(config)
    save_checkpoint(folder, config, run.training_state, Progress(0, 0))
    train(run, 2)
    save_checkpoint(folder, config, run.training_state, Progress(2, 2 * run.global_batch_size))
    return train(run, 2, 3).losses


def load_and_continue(config: RunConfig, folder: Path, again: Path) -> list[float]:
    """Load the checkpoint of another layout, save it again, and continue training."""
    run = build_run(config)
    progress = load_checkpoint(checkpoint_path(folder, 2), config, run.training_state).progress
    save_checkpoint(again, config, run.training_state, progress)
    return train(run, 2, progress.step + 1).losses


def test_even_and_uneven_stages_load_each_other(tmp_path: Path) -> None:
    """Initial weights are equal, a loaded checkpoint is the saved one, and the steps after it are those of the saver.

    Each layout loads the checkpoint of the next one.
    """
    names = list(RESHARDED)
    losses = {name: run_ranks(RESHARDED[name][0], run_first, config_of(name), tmp_path / name)[0] for name in names}
    initial = {name: fingerprint(checkpoint_path(tmp_path / name, 0))["weights"] for name in names}
    assert len(set(initial.values())) == 1, initial
    for name, saver in zip(names, names[1:] + names[:1], strict=True):
        again = tmp_path / f"{name}-again"
        found = run_ranks(RESHARDED[name][0], load_and_continue, config_of(name), tmp_path / saver, again)[0]
        before, after = fingerprint(checkpoint_path(tmp_path / saver, 2)), fingerprint(checkpoint_path(again, 2))
        assert {part: after[part] for part in PARTS} == {part: before[part] for part in PARTS}, (saver, name)
        assert found == pytest.approx(losses[saver], abs=LAYOUT_LOSS, rel=0), (saver, name)


def test_a_resumed_run_with_uneven_stages_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """Bitwise, in the layout that saved."""
    losses = run_ranks(2, run_first, config_of("layout-virtual"), tmp_path / "first")
    again = run_ranks(2, load_and_continue, config_of("layout-virtual"), tmp_path / "first", tmp_path / "again")
    assert again == losses


def quantized_layers(config: RunConfig) -> dict[str, bool]:
    """Whether each linear of this rank is emulated, by its name in records."""
    chunks = unwrap_model(build_run(config).training_state.chunks)
    return {
        name: type(linear).__name__.startswith("Emulated") for chunk in chunks for name, linear in named_linears(chunk)
    }


def test_a_precision_map_counts_layers_of_the_model() -> None:
    """Layer 2 alone is in BF16, whichever stage has it."""
    flags = f"--bf16 {FOUR_LAYERS} {FP8} --transformer-impl emulated --precision layers.2.*=bf16"
    expected = run_ranks(1, quantized_layers, small_config("llama", flags))[0]
    assert {name for name, is_quantized in expected.items() if not is_quantized} == {
        f"layers.2.{linear}" for linear in LINEARS
    }
    for layout in (f"{LAYOUT} Et*3|tL", f"{LAYOUT} E|tt|t|tL", f"{FIRST} 1"):
        flags_here = f"{flags} --pipeline-model-parallel-size 2 {layout}"
        ranks = run_ranks(2, quantized_layers, small_config("llama", f"{flags_here} --micro-batch-size 2", 2))
        assert {name: is_quantized for rank in ranks for name, is_quantized in rank.items()} == expected
        assert sum(map(len, ranks)) == len(expected)
