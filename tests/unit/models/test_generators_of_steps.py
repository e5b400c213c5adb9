"""Layers that round stochastically draw from the same generators in each step, as a CUDA graph of steps has to."""

from __future__ import annotations

from ranks import run_ranks
from small_run import build_run, small_config, train

from megafp8.quantization.nvfp4 import RoundingNoise


def check_generators() -> None:
    run = build_run(small_config("llama", "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4"))
    noises = [
        module for chunk in run.training_state.chunks for module in chunk.modules() if isinstance(module, RoundingNoise)
    ]
    found = []
    for step in (1, 2):
        train(run, 1, first_step=step)
        found.append([list(noise.generators) for noise in noises])
    assert noises and all(found[0]) and found[1] == found[0]
    assert all(noise.num_draws == 2 * len(noise.generators) for noise in noises)


def test_each_step_draws_from_the_generators_of_the_first() -> None:
    run_ranks(1, check_generators)
