"""The signal-to-noise ratio of a layer's gradients: by hand, and the same under every layout."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from small_run import build_run, small_config, train

from megafp8.optimizer.gradient_snr import gradient_snr
from megafp8.training.extensions.guard import layer_snr, layer_warnings

NUM_STEPS = 3


def ratios(flags: str, world_size: int = 1) -> list[float]:
    """Those of all layers after some steps; the same on all ranks."""
    config = small_config("llama", f"--bf16 {flags}", world_size)

    def compute() -> list[float]:
        run = build_run(config)
        train(run, NUM_STEPS)
        found, num_updates = gradient_snr(
            run.training_state.optimizer, run.training_state.chunks, run.config.model.num_layers, (0.9, 0.95)
        )
        assert num_updates == NUM_STEPS
        return found

    first, *others = run_ranks(world_size, compute)
    assert all(other == first for other in others)
    return first


def test_it_is_the_ratio_of_unbiased_moments() -> None:
    def compute() -> tuple[list[float | None], list[float]]:
        run = build_run(small_config("llama", "--bf16"))
        train(run, NUM_STEPS)
        expected = []
        for layer in run.training_state.chunks[0].module.module.decoder.layers:
            signal = noise = 0.0
            for weight in layer.parameters():
                (state,) = (
                    part.optimizer.state[weight.main_param]
                    for part in run.training_state.optimizer.chained_optimizers
                    if weight.main_param in part.optimizer.state
                )
                signal += (state["exp_avg"] / (1 - 0.9**NUM_STEPS)).double().square().sum().item()
                noise += (state["exp_avg_sq"] / (1 - 0.95**NUM_STEPS)).double().sum().item()
            expected.append(signal / noise)
        betas = run.config.optimizer.adam_beta1, run.config.optimizer.adam_beta2
        assert betas == (0.9, 0.95)
        found, _ = gradient_snr(run.training_state.optimizer, run.training_state.chunks, len(expected), betas)
        return found, expected

    ((found, expected),) = run_ranks(1, compute)
    assert found == pytest.approx(expected, rel=1e-5)
    assert all(0 < ratio <= 1 for ratio in expected)


@pytest.mark.parametrize(
    "layout",
    ["--use-distributed-optimizer", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"],
)
def test_layouts_have_the_same_ratio(layout: str) -> None:
    assert ratios(layout, 2) == pytest.approx(ratios(""), rel=0.02)


def test_there_is_none_without_moments() -> None:
    def compute() -> list[float | None]:
        run = build_run(small_config("llama", "--bf16"))
        return gradient_snr(run.training_state.optimizer, run.training_state.chunks, 2, (0.9, 0.95))

    assert run_ranks(1, compute) == [([None, None], 0)]


def test_moments_of_few_updates_say_nothing() -> None:
    """The number of updates counts, not that of steps: a run may start with new moments at any step."""

    def compute() -> tuple[int, int]:
        run = build_run(small_config("llama", "--bf16"))
        train(run, 19)
        before = len(layer_snr(run))
        train(run, 1)
        return before, len(layer_snr(run))

    ((before, after),) = run_ranks(1, compute)
    assert before == 0 and after == 2


def test_a_ratio_that_rises_again_is_found() -> None:
    key = ("gradient SNR", "layers.0")
    trend = (0.7, 0.05, 0.05)
    assert list(layer_warnings({key: 0.19}, {key: trend})) == [], "small"
    assert list(layer_warnings({key: 0.7}, {key: (0.3, 0.7)})) == [], "less than three times the smallest"
    ((_, detail),) = layer_warnings({key: 0.21}, {key: trend})
    assert detail == "gradient SNR of layers.0 grew from 0.05 to 0.21 in 3 intervals"
