"""Samples of text in training are those of `megafp8 generate --greedy`, in every layout, and do not affect training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from ranks import run_ranks
from small_run import FP8, PLAIN, VIRTUAL, build_run, fingerprint, layers_of, small_config, train, weights

from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.schema import RunConfig
from megafp8.metrics.records import SampleRecord
from megafp8.metrics.sinks import Sinks
from megafp8.training.extension import LoopState
from megafp8.training.extensions.text_samples import TextSamples
from megafp8.training.generation import generate_text
from megafp8.training.language_model import load_language_model
from megafp8.training.run import Run
from megafp8.training.sampling import GREEDY

SHORT = "100 101 102 32"
LONG = " ".join(str(97 + index % 20) for index in range(30))  # the window slides
PROMPTS, NUM_TOKENS, STEP = (SHORT, LONG), 6, 2
SAMPLES = f"--sample-interval {STEP} --sample-tokens {NUM_TOKENS}"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
FSDP = "--use-torch-fsdp2 --no-gradient-accumulation-fusion"
MIXTURE = "--num-experts 4 --moe-router-topk 2 --moe-input-jitter-eps 0.1"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
LAYOUTS = [
    pytest.param(1, "", id="one"),
    pytest.param(2, TENSOR, id="tp2-sp"),
    pytest.param(2, PIPELINE, id="pp2"),
    pytest.param(2, VIRTUAL, id="pp2-virtual2"),
    pytest.param(2, OVERLAP, id="dp2-overlap"),
    pytest.param(2, FSDP, id="fsdp2"),
    pytest.param(2, "--context-parallel-size 2", id="cp2"),
]
DELAYED = "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4"
QUARTET2 = (
    "--bf16 --fp4-format e2m1 --fp4-recipe quartet2 --hidden-size 128 --kv-channels 128 --ffn-hidden-size 384 "
    "--num-attention-heads 2"
)
QUANTIZED = [
    pytest.param(1, f"--bf16 {FP8} {DROPOUT}", id="fp8"),
    pytest.param(1, f"--bf16 {DELAYED}", id="delayed"),
    pytest.param(1, QUARTET2, id="quartet2"),
    pytest.param(1, f"{PLAIN} {MIXTURE}", id="mixture"),
    pytest.param(1, f"{PLAIN} --mtp-num-layers 1", id="multi-token"),
    pytest.param(2, f"--bf16 {FP8} {DROPOUT} {TENSOR}", id="fp8-tp2-sp"),
    pytest.param(2, f"--bf16 {FP8} {DROPOUT} {PIPELINE}", id="fp8-pp2"),
    pytest.param(2, f"--bf16 {DELAYED} {VIRTUAL} {OVERLAP}", id="delayed-virtual-pp2"),
    pytest.param(2, f"--bf16 {FP8} {FSDP}", id="fp8-fsdp2"),
]


class Kept:
    """A sink that keeps its records."""

    def __init__(self) -> None:
        self.records: list[SampleRecord] = []

    def write(self, record: SampleRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def sampling(config: RunConfig) -> RunConfig:
    """The configuration with both prompts, which are several words each."""
    return dataclasses.replace(config, logging=dataclasses.replace(config.logging, sample_prompt=PROMPTS))


def samples_of(run: Run) -> list[SampleRecord]:
    """The samples after the steps so far."""
    kept, extension = Kept(), TextSamples()
    state = LoopState(run, Sinks([kept]), Progress(STEP, STEP * run.global_batch_size), 0.0)
    extension.open(state)
    extension.after_step(state, result=None)
    state.close()
    return kept.records


def texts_of_a_run(config: RunConfig, folder: Path | None = None) -> list[str]:
    """Train, sample, and save the weights that were sampled from."""
    run = build_run(config)
    train(run, STEP)
    records = samples_of(run)
    if folder is not None:
        progress = Progress(STEP, STEP * run.global_batch_size)
        save_checkpoint(folder, run.config, run.training_state, progress)
    assert [record.prompt for record in records] == list(PROMPTS)
    return [record.text for record in records]


def generated(folder: Path) -> list[str]:
    """The texts of `megafp8 generate --greedy --no-cache`."""
    model = load_language_model(folder, uses_cache=False)
    return [generate_text(model, prompt, GREEDY, NUM_TOKENS, 1, lambda text: None).text for prompt in PROMPTS]


@pytest.mark.parametrize("precision", [PLAIN, f"--bf16 {FP8}"], ids=["plain", "fp8"])
def test_samples_are_those_of_generate(precision: str, tmp_path: Path) -> None:
    config = sampling(small_config("llama", f"{precision} {SAMPLES} --lr 1e-2"))
    assert run_ranks(1, texts_of_a_run, config, tmp_path) == run_ranks(1, generated, tmp_path)


@pytest.mark.parametrize(("world_size", "flags"), LAYOUTS[1:])
def test_every_layout_gives_the_same_text(world_size: int, flags: str) -> None:
    expected = run_ranks(1, texts_of_a_run, sampling(small_config("llama", f"{PLAIN} {SAMPLES} {layers_of(flags)}")))
    config = sampling(small_config("llama", f"{PLAIN} {SAMPLES} {flags}", world_size))
    assert run_ranks(world_size, texts_of_a_run, config) == expected * world_size


@pytest.mark.parametrize(("world_size", "flags"), QUANTIZED)
def test_samples_do_not_change_training(world_size: int, flags: str) -> None:
    """Bitwise: random generators, amax histories, pending gathers and weight codes are unchanged."""
    config = sampling(small_config("llama", f"{SAMPLES} {flags}", world_size))

    def steps(has_samples: bool) -> tuple[list[float], str]:
        run = build_run(config)
        losses = train(run, STEP).losses
        if has_samples:
            assert len(samples_of(run)) == len(PROMPTS)
        losses += train(run, 2, STEP + 1).losses
        mine = {name: each.to_local() if hasattr(each, "to_local") else each for name, each in weights(run).items()}
        return losses, fingerprint(mine)

    assert run_ranks(world_size, steps, True) == run_ranks(world_size, steps, False)
