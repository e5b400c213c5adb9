"""Multi-token prediction: every layout trains the model of one rank, in FP32 without quantization, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from small_run import PLAIN, SourceSamples, build_run, fingerprint, small_config, weights
from tolerances import LAYOUT_GRAD_NORM, LAYOUT_LOSS

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.schema import RunConfig
from megafp8.training.evaluation import build_batches, evaluate
from megafp8.training.extensions.replica_check import check_replicas
from megafp8.training.run import Run
from megafp8.training.step import StepResult, train_step

NUM_STEPS, STEPS_BEFORE_SAVE = 4, 2
DEPTHS = "--num-layers 2 --mtp-num-layers 2 --mtp-loss-scaling-factor 0.3"
LATENT = (
    "--num-layers 2 --mtp-num-layers 1 --multi-latent-attention --q-lora-rank 48 --kv-lora-rank 32 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 32 --num-experts 4 --moe-ffn-hidden-size 48 --moe-layer-freq [0,1] "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss"
)
MODELS = {"dense": ("llama", DEPTHS), "latent-experts": ("latent", LATENT)}
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
STAGES = "--pipeline-model-parallel-size 2"
CASES = [
    pytest.param("dense", 2, TENSOR, id="dense-tp2-sp"),
    pytest.param("dense", 2, STAGES, id="dense-pp2"),
    pytest.param("dense", 2, f"{STAGES} --pipeline-model-parallel-layout Ett|mmL", id="dense-pp2-layout"),
    pytest.param("dense", 2, "--use-distributed-optimizer", id="dense-dp2"),
    pytest.param("dense", 2, "--context-parallel-size 2", id="dense-cp2"),
    pytest.param("latent-experts", 2, TENSOR, id="latent-experts-tp2-sp"),
]
reference: dict[str, list[StepResult]] = {}


def config_of(model: str, flags: str, world_size: int = 1) -> RunConfig:
    style, shape = MODELS[model]
    return small_config(style, f"{PLAIN} {shape} {flags}", world_size)


def steps(run: Run, first_step: int = 1, num_steps: int = NUM_STEPS) -> list[StepResult]:
    """Steps on samples with different numbers of tokens."""
    samples, batch, last = SourceSamples(32, is_masked=True), run.global_batch_size, first_step + num_steps - 1
    batches = build_batches(run, samples, (first_step - 1) * batch, last * batch, num_workers=0)
    return [train_step(run, batches, Progress(step, step * batch)) for step in range(first_step - 1, last)]


def train_and_compare_replicas(config: Any) -> list[StepResult]:
    run = build_run(config)
    results = steps(run)
    check_replicas(run, NUM_STEPS)
    return results


def one_rank(model: str) -> list[StepResult]:
    if model not in reference:
        reference[model] = run_ranks(1, train_and_compare_replicas, config_of(model, ""))[0]
    return reference[model]


@pytest.mark.parametrize(("model", "world_size", "flags"), CASES)
def test_multi_token_prediction_follows_one_rank(model: str, world_size: int, flags: str) -> None:
    ranks = run_ranks(world_size, train_and_compare_replicas, config_of(model, flags, world_size))
    assert all(rank == ranks[0] for rank in ranks)
    for ours, expected in zip(ranks[0], one_rank(model), strict=True):
        assert abs(ours.loss - expected.loss) <= LAYOUT_LOSS
        assert ours.metrics["mtp_losses"] == pytest.approx(expected.metrics["mtp_losses"], abs=LAYOUT_LOSS)
        assert abs(ours.grad_norm / expected.grad_norm - 1) <= LAYOUT_GRAD_NORM["llama"]


def save_and_continue(config: RunConfig, folder: Path) -> tuple[list[StepResult], str]:
    run = build_run(config)
    steps(run, num_steps=STEPS_BEFORE_SAVE)
    save_checkpoint(folder, config, run.training_state, Progress(STEPS_BEFORE_SAVE, STEPS_BEFORE_SAVE * 8))
    return steps(run, STEPS_BEFORE_SAVE + 1, 2), fingerprint(weights(run))


def load_and_continue(config: RunConfig, folder: Path) -> tuple[list[StepResult], str]:
    run = build_run(config)
    load_checkpoint(checkpoint_path(folder, STEPS_BEFORE_SAVE), config, run.training_state)
    return steps(run, STEPS_BEFORE_SAVE + 1, 2), fingerprint(weights(run))


DELAYED = (
    "--transformer-impl emulated --bf16 --fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 "
    "--use-distributed-optimizer --fp8-param-gather"
)


@pytest.mark.parametrize(
    ("model", "flags"), [("latent-experts", "--expert-model-parallel-size 2"), ("dense", f"{STAGES} {DELAYED}")]
)
def test_multi_token_prediction_resumes_to_the_bit(model: str, flags: str, tmp_path: Path) -> None:
    config = config_of(model, flags, 2)
    expected = run_ranks(2, save_and_continue, config, tmp_path)
    resumed = run_ranks(2, load_and_continue, config, tmp_path)
    assert [results[1] for results in resumed] == [results[1] for results in expected]
    assert [[step.metrics["mtp_losses"] for step in results[0]] for results in resumed] == [
        [step.metrics["mtp_losses"] for step in results[0]] for results in expected
    ]


def test_one_rank_loads_the_checkpoint_of_two_stages(tmp_path: Path) -> None:
    two = run_ranks(2, save_and_continue, config_of("dense", STAGES, 2), tmp_path)[1][0]
    one = run_ranks(1, load_and_continue, config_of("dense", ""), tmp_path)[0][0]
    assert abs(one[0].loss - two[0].loss) <= LAYOUT_LOSS
    assert one[0].metrics["mtp_losses"] == pytest.approx(two[0].metrics["mtp_losses"], abs=LAYOUT_LOSS)


def test_without_its_loss_it_changes_nothing() -> None:
    """With a factor of 0 the model trains as one without multi-token prediction, and its modules stay untrained."""
    plain = run_ranks(1, train_and_compare_replicas, small_config("llama", f"{PLAIN} --num-layers 2"))[0]
    unused = run_ranks(1, train_and_compare_replicas, config_of("dense", "--mtp-loss-scaling-factor 0"))[0]
    for ours, expected in zip(unused, plain, strict=True):
        assert ours.loss == pytest.approx(expected.loss, abs=LAYOUT_LOSS)
        assert ours.grad_norm == pytest.approx(expected.grad_norm, rel=LAYOUT_GRAD_NORM["llama"])
    trained = one_rank("dense")[-1].metrics["mtp_losses"]
    assert all(ours < other for ours, other in zip(trained, unused[-1].metrics["mtp_losses"], strict=True))


def validation_loss(config: RunConfig) -> float:
    return evaluate(build_run(config), "valid", SourceSamples(32), 0, 0).loss


def test_validation_is_of_the_main_output() -> None:
    plain = run_ranks(1, validation_loss, small_config("llama", f"{PLAIN} --num-layers 2"))
    assert run_ranks(1, validation_loss, config_of("dense", "")) == plain


def quantized_linears_and_steps(config: RunConfig) -> tuple[set[str], list[StepResult]]:
    run = build_run(config)
    modules = run.training_state.chunks[0].named_modules()
    names = {name.rpartition(".")[2] for name, module in modules if ".mtp." in name and getattr(module, "recipe", None)}
    return names, steps(run, num_steps=2)


RECIPES = {
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4",
    "rowwise": "--fp8-format e4m3 --fp8-recipe rowwise",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains(recipe: str) -> None:
    """In FP4 runs the modules are in high precision, as in megatron-core."""
    shape = "--hidden-size 128 --kv-channels 64 --ffn-hidden-size 128 --num-layers 1 --mtp-num-layers 1"
    config = small_config("llama", f"--bf16 --transformer-impl emulated {shape} {RECIPES[recipe]}")
    linears, (first, second) = run_ranks(1, quantized_linears_and_steps, config)[0]
    names = {"eh_proj", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    assert linears == (set() if recipe == "nvfp4" else names)
    assert second.loss < first.loss + 0.1 and second.metrics["mtp_losses"][0] < first.metrics["mtp_losses"][0] + 0.1


class OtherMaskedLabels(SourceSamples):
    """Samples with other labels where they do not count."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return sample | {"labels": sample["labels"].where(sample["loss_mask"] > 0, 7)}


def first_step(config: RunConfig, kind: type[SourceSamples]) -> StepResult:
    run = build_run(config)
    batches = build_batches(run, kind(32, is_masked=True), 0, run.global_batch_size, num_workers=0)
    return train_step(run, batches, Progress(0, 0))


def test_masked_labels_do_not_count() -> None:
    results = [run_ranks(1, first_step, config_of("dense", ""), kind) for kind in (SourceSamples, OtherMaskedLabels)]
    assert results[0] == results[1]
