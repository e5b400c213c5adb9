"""The moving average of the weights: in every layout and kind of optimizer, saved, resumed, validated and merged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_run import FP8, PLAIN, SourceSamples, build_run, fingerprint, small_config, step_results, train, weights

from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.merge import plan_merge
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.checkpoint.standalone import CheckpointTensors
from megafp8.checkpoint.weight_ema import PREFIX
from megafp8.config.schema import RunConfig
from megafp8.errors import CheckpointError
from megafp8.metrics.records import VALID, VALID_EMA
from megafp8.optimizer.weight_ema import MeanShard
from megafp8.training.evaluation import evaluate
from megafp8.training.run import Run

EMA = "--ema-decay 0.5 --ema-interval 2"
BF16 = "--ema-dtype bf16"
SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
FSDP = "--use-torch-fsdp2 --no-gradient-accumulation-fusion"
DELAYED = "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 3"
LOW_STATE = f"{SHARDED} --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
# Ranks, style of the model, flags.
RUNS = [
    pytest.param(1, "llama", f"--bf16 {PLAIN}", id="bf16"),
    pytest.param(1, "gpt2", f"{PLAIN} {BF16}", id="fp32"),
    pytest.param(2, "llama", f"--bf16 {PLAIN} {OVERLAP} {BF16}", id="overlap"),
    pytest.param(2, "llama", f"{PLAIN} {SHARDED}", id="fp32-sharded"),
    pytest.param(2, "llama", f"--bf16 {PLAIN} {LOW_STATE}", id="low-state"),
    pytest.param(2, "gpt2", f"--bf16 {PLAIN} {SHARDED} --pipeline-model-parallel-size 2 {BF16}", id="pp2-tied"),
    pytest.param(2, "gpt2", f"--bf16 {PLAIN} {FSDP} {BF16}", id="fsdp"),
    pytest.param(2, "llama", f"--bf16 {PLAIN} {FSDP} --torch-fsdp2-no-reshard-after-forward", id="fsdp-gathered"),
    pytest.param(2, "llama", f"--bf16 {FP8} {SHARDED} --fp8-param-gather", id="fp8-weights"),
    pytest.param(2, "llama", f"--bf16 {DELAYED} {OVERLAP} --fp8-param-gather", id="delayed-fp8-weights"),
    pytest.param(2, "llama", f"--bf16 {PLAIN} --optimizer muon {SHARDED} {BF16}", id="muon-sharded"),
    pytest.param(2, "llama", f"--bf16 {FP8} --optimizer muon {SHARDED} --fp8-param-gather", id="muon-fp8-weights"),
    pytest.param(2, "llama", f"--bf16 {PLAIN} --optimizer muon --tensor-model-parallel-size 2", id="muon-tp2"),
    pytest.param(
        2, "llama", f"--bf16 {PLAIN} {SHARDED} --num-experts 4 --expert-model-parallel-size 2 {BF16}", id="ep2"
    ),
]


def means_of(run: Run) -> list[torch.Tensor]:
    """Copies of this rank's means."""
    return [shard.mean.clone() for shard in shards_of(run)]


def shards_of(run: Run) -> list[MeanShard]:
    assert run.training_state.weight_ema is not None
    return run.training_state.weight_ema.shards


def samples_of(run: Run) -> SourceSamples:
    return SourceSamples(run.config.data.seq_length)


@pytest.mark.parametrize(("world_size", "style", "flags"), RUNS)
def test_validating_the_mean_changes_nothing(world_size: int, style: str, flags: str) -> None:
    """To the bit: weights, the losses of validation and training, and the bytes of the next step."""
    config = small_config(style, f"{flags} {EMA}", world_size)

    def steps(is_validated: bool) -> tuple[Any, ...]:
        run = build_run(config)
        train(run, 3)
        losses = evaluate(run, VALID, samples_of(run), 3, 0).loss
        if is_validated:
            assert evaluate(run, VALID_EMA, samples_of(run), 3, 0).loss != losses
        again = evaluate(run, VALID, samples_of(run), 3, 0).loss
        next_steps = [(result.loss, result.grad_norm, dict(result.metrics)) for result in step_results(run, 2, 4)]
        if "no-reshard" in flags:  # FSDP2 gathers again what it would have kept
            next_steps[0][2].pop("param_gather_bytes")
        return losses, again, str(next_steps), fingerprint({k: local(v) for k, v in weights(run).items()})

    assert run_ranks(world_size, steps, True) == run_ranks(world_size, steps, False)


def local(tensor: Any) -> torch.Tensor:
    """This rank's rows of a tensor of FSDP2; another tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


@pytest.mark.parametrize(("world_size", "style", "flags"), RUNS)
def test_resume_is_bit_equal(world_size: int, style: str, flags: str, tmp_path: Path) -> None:
    config = small_config(style, f"{flags} {EMA}", world_size)

    def unbroken() -> list[torch.Tensor]:
        run = build_run(config)
        train(run, 3)
        save_checkpoint(tmp_path, config, run.training_state, Progress(3, 24))
        train(run, 3, 4)
        return means_of(run)

    def resumed() -> list[torch.Tensor]:
        run = build_run(config)
        load_checkpoint(checkpoint_path(tmp_path, 3), config, run.training_state)
        assert run.training_state.weight_ema.num_updates == 1
        train(run, 3, 4)
        return means_of(run)

    for expected, found in zip(run_ranks(world_size, unbroken), run_ranks(world_size, resumed), strict=True):
        for mean, again in zip(expected, found, strict=True):
            assert torch.equal(mean, again) and mean.any()


LAYOUTS = {
    "one": (1, f"--bf16 {PLAIN}"),
    "dp2": (2, f"--bf16 {PLAIN} {SHARDED}"),
    "tp2": (2, f"--bf16 {PLAIN} {SHARDED} --tensor-model-parallel-size 2"),
    "fsdp": (2, f"--bf16 {PLAIN} {FSDP}"),
}


def saved_means(path: Path) -> dict[str, torch.Tensor]:
    """The complete means of a checkpoint by the names of the weights."""
    tensors = CheckpointTensors(path)
    return {name: tensors.load(name) for name in tensors.locations if name.startswith(PREFIX)}


def save_again(config: RunConfig, source: Path, target: Path) -> tuple[str, ...]:
    """Load a checkpoint of step 4, and save what was loaded."""
    run = build_run(config)
    notes = load_checkpoint(source, config, run.training_state).notes
    save_checkpoint(target, config, run.training_state, Progress(4, 32))
    return notes


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A checkpoint of step 4 of each layout."""

    def save(config: RunConfig, folder: Path) -> None:
        run = build_run(config)
        train(run, 4)
        save_checkpoint(folder, config, run.training_state, Progress(4, 32))

    paths = {}
    for name, (world_size, flags) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name)
        run_ranks(world_size, save, small_config("llama", f"{flags} {EMA}", world_size), folder)
        paths[name] = checkpoint_path(folder, 4)
    yield paths


@pytest.mark.parametrize("layout", ["dp2", "tp2", "fsdp"])
def test_layouts_have_the_mean_of_one_rank(layout: str, saved: dict[str, Path]) -> None:
    expected, found = saved_means(saved["one"]), saved_means(saved[layout])
    assert expected.keys() == found.keys() and len(found) == 19
    for name, mean in expected.items():
        # Sums of gradients in another order, which Adam's first steps turn into another sign of a small gradient: up to
        # twice the rate of 1e-3 for each of four steps.
        assert (mean - found[name]).abs().max() <= 8e-3, name
        assert (mean - found[name]).abs().mean() <= 1e-4, name


@pytest.mark.parametrize(
    ("before", "after"), [("dp2", "one"), ("one", "dp2"), ("dp2", "tp2"), ("tp2", "fsdp"), ("fsdp", "dp2")]
)
def test_another_layout_loads_the_same_mean(before: str, after: str, saved: dict[str, Path], tmp_path: Path) -> None:
    world_size, flags = LAYOUTS[after]
    run_ranks(world_size, save_again, small_config("llama", f"{flags} {EMA}", world_size), saved[before], tmp_path)
    expected, found = saved_means(saved[before]), saved_means(checkpoint_path(tmp_path, 4))
    assert expected.keys() == found.keys()
    assert all(torch.equal(mean, found[name]) for name, mean in expected.items())


def test_another_dtype_is_rounded_once(saved: dict[str, Path], tmp_path: Path) -> None:
    world_size, flags = LAYOUTS["dp2"]
    config = small_config("llama", f"{flags} {EMA} --ema-dtype bf16", world_size)
    run_ranks(world_size, save_again, config, saved["dp2"], tmp_path)
    for name, mean in saved_means(checkpoint_path(tmp_path, 4)).items():
        assert torch.equal(mean, saved_means(saved["dp2"])[name].bfloat16()), name


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("", "is dropped: this run has no --ema-decay"),
        (f"{EMA} --no-load-optim", "starts anew, from the loaded weights: with --no-load-optim or --finetune"),
    ],
)
def test_a_run_says_what_it_does_not_load(flags: str, note: str, saved: dict[str, Path], tmp_path: Path) -> None:
    config = small_config("llama", f"{LAYOUTS['one'][1]} {flags}")
    ((*_, found),) = run_ranks(1, save_again, config, saved["one"], tmp_path)
    assert note in found


def test_a_mean_starts_in_a_run_that_had_none(tmp_path: Path) -> None:
    """The first update copies the weights. Optimizer state is not needed in the checkpoint that saves the mean."""
    flags = f"{LAYOUTS['one'][1]} --no-save-optim"

    def save() -> None:
        config = small_config("llama", LAYOUTS["one"][1])
        run = build_run(config)
        save_checkpoint(tmp_path, config, run.training_state, Progress(2, 16))

    def start() -> str:
        config = small_config("llama", f"{flags} {EMA}")
        run = build_run(config)
        notes = load_checkpoint(checkpoint_path(tmp_path, 2), config, run.training_state).notes
        train(run, 1, 3)
        assert not any(mean.any() for mean in means_of(run))
        train(run, 1, 4)
        assert all(torch.equal(shard.mean, shard.master()[0]) for shard in shards_of(run))
        save_checkpoint(tmp_path, config, run.training_state, Progress(4, 32))
        return notes[-1]

    run_ranks(1, save)
    (note,) = run_ranks(1, start)
    assert note.endswith("(--ema-decay) starts anew, from the loaded weights: the checkpoint has none")
    assert saved_means(checkpoint_path(tmp_path, 4))


@pytest.mark.parametrize("layout", ["dp2", "fsdp"])
def test_the_merged_checkpoint_has_the_validated_mean(layout: str, saved: dict[str, Path], tmp_path: Path) -> None:
    world_size, flags = LAYOUTS[layout]
    merged = plan_merge([saved[layout]], has_ema=True).write(tmp_path / "run")
    averaged = CheckpointTensors(merged)
    for name, mean in saved_means(saved[layout]).items():
        assert torch.equal(averaged.load(name.removeprefix(PREFIX)), mean), name
    config = small_config("llama", f"{flags} {EMA}", world_size)

    def losses() -> tuple[float, float]:
        run = build_run(config)
        load_checkpoint(saved[layout], config, run.training_state)
        of_mean = evaluate(run, VALID_EMA, samples_of(run), 4, 0).loss
        load_checkpoint(merged, config, run.training_state, weights_only=True)
        return of_mean, evaluate(run, VALID, samples_of(run), 4, 0).loss

    for of_mean, of_merged in run_ranks(world_size, losses):
        assert of_mean == of_merged


def test_a_checkpoint_without_a_mean_is_not_merged(saved: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(1, save_again, small_config("llama", LAYOUTS["one"][1]), saved["one"], tmp_path)
    with pytest.raises(CheckpointError, match="has no moving average of the weights: its run needs --ema-decay"):
        plan_merge([checkpoint_path(tmp_path, 4)], has_ema=True)


def test_new_rows_of_the_vocabulary_have_the_mean_of_their_weights(tmp_path: Path) -> None:
    """Padding that the checkpoint does not have is not zero, which would dominate the softmax."""
    flags = f"--bf16 {PLAIN} {SHARDED} {EMA} --vocab-size 253 --make-vocab-size-divisible-by 2"

    def save() -> None:
        config = small_config("gpt2", flags)
        run = build_run(config)
        train(run, 2)
        save_checkpoint(tmp_path, config, run.training_state, Progress(2, 16))

    def load() -> torch.Tensor:
        config = small_config("gpt2", flags.replace("-by 2", "-by 64"), 2)
        run = build_run(config)
        load_checkpoint(checkpoint_path(tmp_path, 2), config, run.training_state)
        save_checkpoint(tmp_path, config, run.training_state, Progress(4, 32))

    run_ranks(1, save)
    run_ranks(2, load)
    tensors = CheckpointTensors(checkpoint_path(tmp_path, 4))
    name = "embedding.word_embeddings.weight"
    mean, weight = tensors.load(PREFIX + name), tensors.load(f"optimizer.state.param.{name}")
    assert len(mean) == 256 and torch.equal(mean[254:], weight[254:]) and mean[254:].any()


def test_a_skipped_update_leaves_the_mean() -> None:
    """The loss scale of FP16 overflows in the first steps. Until weights are updated there is no mean."""
    config = small_config("llama", f"--fp16 {PLAIN} --ema-decay 0.5 --ema-interval 1 --initial-loss-scale 1e6")

    def updates() -> tuple[list[bool], list[int]]:
        run, skipped, counts = build_run(config), [], []
        for step in range(1, 25):
            before = means_of(run)
            (result,) = step_results(run, 1, step)
            skipped.append(result.is_skipped)
            counts.append(run.training_state.weight_ema.num_updates)
            is_same = all(torch.equal(old, new) for old, new in zip(before, means_of(run), strict=True))
            assert is_same == result.is_skipped
        return skipped, counts

    ((skipped, counts),) = run_ranks(1, updates)
    assert any(skipped) and not all(skipped)
    assert counts == [sum(not each for each in skipped[: step + 1]) for step in range(24)]
