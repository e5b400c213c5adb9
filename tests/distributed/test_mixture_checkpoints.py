"""Checkpoints of mixtures of experts: resumed to the bit, and loaded under any expert-parallel layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from small_run import Curve, build_run, fingerprint, small_config, train, weights
from tolerances import LAYOUT_LOSS

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.schema import RunConfig
from megafp8.models.router import Router

STEPS = 2
EXPERTS = (
    "--num-layers 2 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --micro-batch-size 2 "
    "--global-batch-size 4 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-shared-expert-intermediate-size 32"
)
PLAIN, SHARDED = "--transformer-impl local", "--use-distributed-optimizer"
EP2 = "--expert-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = {
    "one": (1, ""),
    "ep2": (2, EP2),
    "ep2-tp2-etp1": (2, f"{EP2} {TP2} --expert-tensor-parallel-size 1"),
    "ep2-pp2": (4, f"{EP2} --pipeline-model-parallel-size 2"),
}
Result = tuple[Curve, str]


def config_of(layout: str, flags: str) -> RunConfig:
    world_size, own = LAYOUTS[layout]
    return small_config("llama", f"{EXPERTS} {flags} {own}", world_size)


def save_and_continue(config: RunConfig, folder: Path) -> Result:
    run = build_run(config)
    train(run, STEPS)
    save_checkpoint(folder, config, run.training_state, Progress(STEPS, STEPS * run.global_batch_size))
    return train(run, STEPS, STEPS + 1), fingerprint(weights(run))


def load_and_continue(config: RunConfig, folder: Path) -> Result:
    run = build_run(config)
    load_checkpoint(checkpoint_path(folder, STEPS), config, run.training_state)
    return train(run, STEPS, STEPS + 1), fingerprint(weights(run))


def sources_of(layout: str) -> list[str]:
    """The layouts whose checkpoints it loads: the previous one (the last one for one rank), and one rank."""
    names = list(LAYOUTS)
    index = names.index(layout)
    return sorted({names[index - 1], *names[: min(index, 1)]}, key=names.index)


def load_each_and_continue(config: RunConfig, saved_layouts: list[str], folder: Path) -> dict[str, Curve]:
    """One run loads the checkpoints of these layouts, each over the state of the previous one."""
    run, curves = build_run(config), {}
    for saved in saved_layouts:
        load_checkpoint(checkpoint_path(folder / saved, STEPS), config, run.training_state)
        curves[saved] = train(run, STEPS, STEPS + 1)
    return curves


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of one rank. Tests must not write to it."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(1, save_and_continue, config_of("one", PLAIN), folder)
    return folder


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        pytest.param("ep2", f"{PLAIN} {SHARDED}", id="sharded"),
        pytest.param("ep2", PLAIN, id="plain"),
        pytest.param(
            "ep2-tp2-etp1",
            f"{SHARDED} --bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4",
            id="delayed",
        ),
    ],
)
def test_a_mixture_resumes_to_the_bit(layout: str, flags: str, tmp_path: Path) -> None:
    config, world_size = config_of(layout, flags), LAYOUTS[layout][0]
    expected = run_ranks(world_size, save_and_continue, config, tmp_path)
    assert run_ranks(world_size, load_and_continue, config, tmp_path) == expected


@pytest.mark.parametrize("optimizer", [pytest.param(SHARDED, id="sharded"), pytest.param("", id="plain")])
def test_every_layout_loads_the_experts_of_another(
    optimizer: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Every layout loads, and every layout is loaded; all ordered pairs with --long."""
    is_long = request.config.getoption("--long")
    configs = {layout: config_of(layout, f"{PLAIN} {optimizer}") for layout in LAYOUTS}
    expected = {
        saved: run_ranks(LAYOUTS[saved][0], save_and_continue, config, tmp_path / saved)[0][0]
        for saved, config in configs.items()
    }
    for layout, config in configs.items():
        sources = list(LAYOUTS) if is_long else sources_of(layout)
        found = run_ranks(LAYOUTS[layout][0], load_each_and_continue, config, sources, tmp_path)[0]
        assert list(found) == sources
        for saved, curve in found.items():
            differences = [abs(a - b) for a, b in zip(curve.losses, expected[saved].losses, strict=True)]
            assert max(differences) <= LAYOUT_LOSS, (saved, layout, differences)


@pytest.mark.parametrize(
    ("before", "after", "saving", "loading"),
    [
        pytest.param("one", "ep2", "", SHARDED, id="one-to-ep2-sharded"),
        pytest.param("ep2", "one", SHARDED, "", id="ep2-sharded-to-one"),
        pytest.param("one", "ep2", SHARDED, "", id="one-sharded-to-ep2"),
    ],
)
def test_the_distributed_optimizer_may_change_with_the_layout(
    before: str, after: str, saving: str, loading: str, tmp_path: Path
) -> None:
    """Also the number of optimizers: experts have one of their own on two ranks."""
    saved = config_of(before, f"{PLAIN} {saving}")
    curve = run_ranks(LAYOUTS[before][0], save_and_continue, saved, tmp_path)[0][0]
    loaded = config_of(after, f"{PLAIN} {loading}")
    continued = run_ranks(LAYOUTS[after][0], load_and_continue, loaded, tmp_path)[0][0]
    assert continued.losses == pytest.approx(curve.losses, abs=LAYOUT_LOSS, rel=0)


@pytest.mark.parametrize(
    "change",
    [
        "--moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.001",
        "--moe-router-load-balancing-type global_aux_loss",
        "--moe-router-load-balancing-type none",
        "--moe-router-dtype fp64 --moe-input-jitter-eps 0.01",
        "--moe-router-force-load-balancing",
        "--make-vocab-size-divisible-by 512",
    ],
)
def test_coefficients_of_training_may_change(saved: Path, change: str) -> None:
    """All weights are those of the checkpoint, and training continues."""

    def load(config: RunConfig) -> dict[str, str]:
        run = build_run(config)
        load_checkpoint(checkpoint_path(saved, STEPS), config, run.training_state)
        found = weights(run)
        train(run, 1, STEPS + 1)
        return {name: fingerprint({name: tensor[:256]}) for name, tensor in found.items()}  # without more padding

    same = run_ranks(1, load, config_of("one", PLAIN))[0]
    assert run_ranks(1, load, config_of("one", f"{PLAIN} {change}"))[0] == same


@pytest.mark.parametrize(("before", "after"), [(1e-3, 0), (0, 1e-3)])
def test_updates_of_the_expert_bias_may_stop_and_start(before: float, after: float, tmp_path: Path) -> None:
    """The bias goes on from the checkpoint's, and stays where its rate is 0."""
    saving, loading = (config_of("one", f"{PLAIN} --moe-router-bias-update-rate {rate}") for rate in (before, after))
    run_ranks(1, save_and_continue, saving, tmp_path)

    def biases_around_a_step() -> list[torch.Tensor]:
        run = build_run(loading)
        load_checkpoint(checkpoint_path(tmp_path, STEPS), loading, run.training_state)
        routers = [module for module in run.training_state.chunks[0].modules() if isinstance(module, Router)]
        found = [torch.stack([router.expert_bias for router in routers])]
        train(run, 1, STEPS + 1)
        return [*found, torch.stack([router.expert_bias for router in routers])]

    loaded, trained = run_ranks(1, biases_around_a_step)[0]
    assert bool(loaded.any()) == (before > 0)
    assert torch.equal(trained, loaded) == (after == 0)
