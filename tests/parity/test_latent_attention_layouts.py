"""Multi-latent attention: every layout trains the model of one rank, in FP32 without quantization, and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from small_run import (
    PLAIN,
    Curve,
    assert_follows,
    build_run,
    curve_of,
    curve_of_equal_replicas,
    fingerprint,
    small_config,
    train,
    weights,
)
from tolerances import LAYOUT_GRAD_NORM, LAYOUT_LOSS

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.schema import RunConfig

NUM_STEPS, STEPS_BEFORE_SAVE = 4, 2
LATENT = (
    "--num-layers 2 --multi-latent-attention --q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 32 --qk-layernorm --rotary-scaling-factor 4 --mscale-all-dim 1 "
    "--yarn-original-max-position-embeddings 8"
)
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 48 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 "
    "--moe-router-load-balancing-type seq_aux_loss"
)
PLAIN_QUERIES = "--num-layers 2 --multi-latent-attention --rope-type rope --recompute-granularity selective "
PLAIN_QUERIES += "--recompute-modules mla_up_proj core_attn"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
MODELS = {"dense": LATENT, "experts": f"{LATENT} {EXPERTS}", "plain-queries": PLAIN_QUERIES}
LAYOUTS = {
    "tp2": (2, TENSOR, tuple(MODELS)),
    "pp2": (2, "--pipeline-model-parallel-size 2", ("dense",)),
    "cp2": (2, "--context-parallel-size 2", ("dense",)),
    "dp2-distributed-optimizer": (2, "--use-distributed-optimizer", ("plain-queries",)),
}
CASES = [
    pytest.param(model, world_size, flags, id=f"{model}-{name}")
    for name, (world_size, flags, models) in LAYOUTS.items()
    for model in models
]
reference: dict[str, Curve] = {}


def latent_config(flags: str, world_size: int = 1) -> RunConfig:
    return small_config("latent", flags, world_size)


def one_rank(model: str) -> Curve:
    if model not in reference:
        reference[model] = run_ranks(1, curve_of, latent_config(f"{PLAIN} {MODELS[model]}"), NUM_STEPS)[0]
    return reference[model]


@pytest.mark.parametrize(("model", "world_size", "flags"), CASES)
def test_latent_attention_follows_one_rank(model: str, world_size: int, flags: str) -> None:
    config = latent_config(f"{PLAIN} {MODELS[model]} {flags}", world_size)
    curves = run_ranks(world_size, curve_of_equal_replicas, config, NUM_STEPS)
    expected = one_rank(model)
    assert all(curve == curves[0] for curve in curves)
    assert_follows(curves[0], expected, LAYOUT_GRAD_NORM["llama"])


def test_recomputed_projections_train_the_same() -> None:
    remaining = MODELS["plain-queries"].partition("--recompute")[0]
    assert run_ranks(1, curve_of, latent_config(f"{PLAIN} {remaining}"), NUM_STEPS)[0] == one_rank("plain-queries")


def test_yarn_changes_the_training() -> None:
    """Otherwise the tests above could not tell whether its frequencies and its scale are right."""
    other = LATENT.partition("--rotary-scaling-factor")[0] + "--rope-type rope"
    assert run_ranks(1, curve_of, latent_config(f"{PLAIN} {other}"), 2)[0].losses != one_rank("dense").losses[:2]


def save_and_continue(config: RunConfig, folder: Path) -> tuple[Curve, str]:
    run = build_run(config)
    train(run, STEPS_BEFORE_SAVE)
    progress = Progress(STEPS_BEFORE_SAVE, STEPS_BEFORE_SAVE * run.global_batch_size)
    save_checkpoint(folder, config, run.training_state, progress)
    return train(run, STEPS_BEFORE_SAVE, STEPS_BEFORE_SAVE + 1), fingerprint(weights(run))


def load_and_continue(config: RunConfig, folder: Path) -> tuple[Curve, str]:
    run = build_run(config)
    load_checkpoint(checkpoint_path(folder, STEPS_BEFORE_SAVE), config, run.training_state)
    return train(run, STEPS_BEFORE_SAVE, STEPS_BEFORE_SAVE + 1), fingerprint(weights(run))


DELAYED = "--bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --use-distributed-optimizer"


@pytest.mark.parametrize("flags", [pytest.param(PLAIN, id="plain"), pytest.param(DELAYED, id="delayed")])
def test_latent_attention_resumes_to_the_bit(flags: str, tmp_path: Path) -> None:
    config = latent_config(f"{LATENT} {flags} {TENSOR}", 2)
    expected = run_ranks(2, save_and_continue, config, tmp_path)
    assert run_ranks(2, load_and_continue, config, tmp_path) == expected


def test_one_rank_loads_the_checkpoint_of_two(tmp_path: Path) -> None:
    two = run_ranks(2, save_and_continue, latent_config(f"{LATENT} {PLAIN} {TENSOR}", 2), tmp_path)[0][0]
    one = run_ranks(1, load_and_continue, latent_config(f"{LATENT} {PLAIN}"), tmp_path)[0][0]
    assert abs(one.losses[0] - two.losses[0]) <= LAYOUT_LOSS
