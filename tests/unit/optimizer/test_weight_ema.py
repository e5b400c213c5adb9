"""The moving average of weights against its formula in FP64, and rounding at random."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import run_ranks
from small_run import PLAIN, build_run, small_config, train

from megafp8.kernels.random_rounding import round_at_random

NUM_STEPS, DECAY = 50, 0.9
SPACING = 2.0**-7  # of BF16 from 1 to 2


def errors_after(dtype: str) -> torch.Tensor:
    """Of all means after the steps of a run, relative to FP64: the difference, and the mean; two rows."""
    config = small_config("llama", f"--bf16 {PLAIN} --ema-decay {DECAY} --ema-interval 1 --ema-dtype {dtype}")

    def steps() -> torch.Tensor:
        run = build_run(config)
        shards = run.training_state.weight_ema.shards
        means = [torch.zeros(shard.mean.numel(), dtype=torch.float64) for shard in shards]
        for step in range(1, NUM_STEPS + 1):
            train(run, 1, step)
            share = max(1 - DECAY, 1 / step)
            for mean, shard in zip(means, shards, strict=True):
                mean += share * (shard.master()[0].double() - mean)
        exact = torch.cat(means)
        return torch.stack([torch.cat([shard.mean for shard in shards]).double() - exact, exact])

    return run_ranks(1, steps)[0]


def test_the_mean_is_the_formula_in_fp64() -> None:
    errors, exact = errors_after("fp32")
    # An update has three roundings, each of at most half a unit of 2^-23 of a number below the largest weight, of which
    # later updates leave the share `DECAY`.
    assert errors.abs().max() <= 3 * 2**-24 * exact.abs().max() / (1 - DECAY)


def test_the_mean_in_bf16_is_unbiased() -> None:
    """Also where every update is far below half a unit, which rounding to nearest would lose."""
    errors, exact = errors_after("bf16")
    relative = (errors / exact)[exact.abs() > 1e-3]
    # In the direction away from zero and towards it alike; five standard errors.
    assert abs(relative.mean()) <= 5 * relative.std() / math.sqrt(len(relative))
    assert relative.std() <= 4 * SPACING  # the distance from a weight to its mean is some ten of its units


def test_the_noise_of_bf16_is_as_described() -> None:
    """Weights that move steadily stay a constant distance ahead of their mean, from 1 to almost 2."""
    decay, distance, count = 0.99, 40 * SPACING, 1 << 14
    generator = torch.Generator().manual_seed(0)
    exact = torch.ones(count, dtype=torch.float64)
    mean = exact.bfloat16()
    for update in range(310):
        weights = exact + distance + torch.rand(count, generator=generator) * SPACING
        exact += (1 - decay) * (weights - exact)
        mean = round_at_random(torch.lerp(mean.float(), weights.float(), 1 - decay), weights.float(), 0, update)
    assert 1.9 < exact.max() < 2
    noise = (mean.double() - exact) / SPACING
    assert abs(noise.mean()) <= 5 * noise.std() / math.sqrt(count)
    # An update moves the mean by the share f = 0.4 of a spacing, whose variance is f (1 - f) and not f.
    assert noise.std() == pytest.approx(math.sqrt((1 - 0.4) * 40 / 2), rel=0.1)


@pytest.mark.parametrize("value", [1.0, -1.0])
def test_rounding_at_random_has_the_expectation_of_the_value(value: float) -> None:
    count = 1 << 20
    for fraction in (0.0, 2**-10, 0.25, 0.5, 0.9):
        values = torch.full((count,), value * (1 + fraction * SPACING))
        rounded = round_at_random(values, torch.ones(count), 0, 1).double()
        assert set(rounded.unique().tolist()) <= {value, value * (1 + SPACING)}
        share = ((rounded - value) / (value * SPACING)).mean()
        assert abs(share - fraction) <= 5 * math.sqrt(fraction * (1 - fraction) / count) + 2**-16


def test_random_bits_depend_on_position_update_and_element() -> None:
    values, ones = torch.full((1 << 16,), 1 + SPACING / 2), torch.ones(1 << 16)
    drawn = round_at_random(values, ones, 0, 1)
    assert torch.equal(drawn, round_at_random(values, ones, 0, 1))
    # A shard draws what the complete weight draws.
    assert torch.equal(drawn[1000:], round_at_random(values[1000:], ones[1000:], 1000, 1))
    for other in (
        round_at_random(values, ones, 0, 2),
        round_at_random(values, 1.5 * ones, 0, 1),
        round_at_random(values, ones, 1, 1),
    ):
        assert abs((drawn == other).float().mean() - 0.5) <= 5 * 0.5 / math.sqrt(1 << 16)


def test_every_nan_stays_one() -> None:
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1], dtype=torch.int32).repeat(1000)
    assert round_at_random(bits.view(torch.float32), torch.arange(4000.0), 0, 1).isnan().all()


def test_zeros_and_infinities_stay() -> None:
    values = torch.tensor([0.0, -0.0, math.inf, -math.inf]).repeat(1000)
    rounded = round_at_random(values, torch.ones(4000), 0, 1)
    assert torch.equal(rounded.float().view(torch.int32), values.view(torch.int32))
