"""Validation gives the loss of one rank on every layout, and training does not notice it."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from small_run import FP8, PLAIN, SourceSamples, build_run, fingerprint, small_config, train, weights
from tolerances import LAYOUT_LOSS

from megafp8.config.schema import RunConfig
from megafp8.telemetry.records import EvalRecord
from megafp8.training.evaluate import evaluate

TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
VIRTUAL = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
LAYOUTS = [
    pytest.param(1, "--micro-batch-size 1", id="micro1"),
    pytest.param(2, TENSOR, id="tp2-sp"),
    pytest.param(2, VIRTUAL, id="pp2-virtual2"),
    pytest.param(2, OVERLAP, id="dp2-overlap"),
    pytest.param(2, "--context-parallel-size 2", id="cp2"),
    pytest.param(4, f"{VIRTUAL} {OVERLAP} --micro-batch-size 1", id="pp2-virtual2-dp2-overlap"),
]


def validate_after(config: RunConfig, num_steps: int) -> EvalRecord:
    """Train a little, then take the loss on samples that count differently."""
    run = build_run(config)
    train(run, num_steps)
    return evaluate(run, "valid", SourceSamples(run.config.data.seq_length, is_masked=True), num_steps, 0)


@pytest.mark.parametrize(("world_size", "flags"), LAYOUTS)
def test_every_layout_gives_the_same_loss(world_size: int, flags: str) -> None:
    expected = run_ranks(1, validate_after, small_config("llama", PLAIN), 2)[0]
    config = small_config("llama", f"{PLAIN} {flags}", world_size)
    for record in run_ranks(world_size, validate_after, config, 2):
        assert record.loss == pytest.approx(expected.loss, abs=LAYOUT_LOSS, rel=0)
        assert record.num_tokens == expected.num_tokens < 2 * 8 * 32


@pytest.mark.parametrize(("world_size", "flags"), LAYOUTS)
def test_training_goes_on_as_if_nothing_had_been(world_size: int, flags: str) -> None:
    """Bit for bit: dropout's streams, gathers under way and weight codes are as they were."""
    precision = f"--bf16 {FP8} {DROPOUT}" if "context" not in flags else f"{PLAIN} {DROPOUT}"
    config = small_config("gpt2", f"{precision} {flags}", world_size)

    def steps(is_validated: bool) -> tuple[list[float], str]:
        run = build_run(config)
        losses = train(run, 2).losses
        if is_validated:
            evaluate(run, "valid", SourceSamples(run.config.data.seq_length), 2, 0)
        losses += train(run, 2, 3).losses
        return losses, fingerprint(weights(run))

    assert run_ranks(world_size, steps, True) == run_ranks(world_size, steps, False)


def test_dropout_is_off() -> None:
    """The validation loss of the same weights is a number, not a draw."""
    config = small_config("gpt2", f"{PLAIN} {DROPOUT}")

    def twice() -> tuple[float, float]:
        run = build_run(config)
        samples = SourceSamples(run.config.data.seq_length)
        return evaluate(run, "valid", samples, 0, 0).loss, evaluate(run, "valid", samples, 0, 0).loss

    (first, second), = run_ranks(1, twice)
    assert first == second
