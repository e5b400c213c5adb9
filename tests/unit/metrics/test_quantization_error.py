"""Quantization statistics, compared with a reference that computes value by value."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from megafp8.metrics import quantization_error
from megafp8.metrics.quantization_error import NUM_OCTAVES, RUN_VALUES, QuantizationStats, quantization_stats

FORMAT_MAX = 448.0


def decibel(signal: float, noise: float) -> float:
    return math.inf if noise == 0 else 10 * math.log10(signal / noise)


def slow_stats(values: Tensor, dequantized: Tensor, scales: Tensor) -> dict[str, object]:
    """The same statistics of [rows, columns], one value at a time; all values finite."""
    triples = [
        list(zip(*rows, strict=True))
        for rows in zip(values.tolist(), dequantized.tolist(), scales.expand(values.shape).tolist(), strict=True)
    ]
    flat = [triple for row in triples for triple in row]
    nonzero = [(x, y, s) for x, y, s in flat if x != 0]
    octaves = [0] * NUM_OCTAVES
    scaled = [(x, y, s) for x, y, s in nonzero if s != 0]
    for x, _, s in scaled:
        below = 0
        while below < NUM_OCTAVES - 1 and abs(x) <= s * FORMAT_MAX * 2.0 ** -(below + 1):
            below += 1
        octaves[below] += 1
    local = []
    for row in triples:
        for start in range(0, len(row), RUN_VALUES):
            run = row[start : start + RUN_VALUES]
            if signal := sum(x * x for x, _, _ in run):
                local.append(decibel(signal, sum((x - y) ** 2 for x, y, _ in run)))
    return {
        "num_values": len(flat),
        "num_non_finite": 0,
        "amax": max(abs(x) for x, _, _ in flat),
        "scale_min": min(s for _, _, s in scaled),
        "scale_max": max(s for _, _, s in scaled),
        "scale_spread_octaves": math.log2(max(s for _, _, s in scaled) / min(s for _, _, s in scaled)),
        "underflow_fraction": sum(y == 0 for _, y, _ in nonzero) / len(nonzero),
        "zero_scale_fraction": (len(nonzero) - len(scaled)) / len(nonzero),
        "saturated_fraction": sum(abs(x) > s * FORMAT_MAX * (1 + 2.0**-20) for x, _, s in scaled) / len(flat),
        "sqnr_db": decibel(sum(x * x for x, _, _ in flat), sum((x - y) ** 2 for x, y, _ in flat)),
        "local_sqnr_db": statistics.median_low(local),
        "max_abs_error": max(abs(x - y) for x, y, _ in flat),
        "octave_counts": tuple(octaves),
    }


def check_equal(found: QuantizationStats, expected: dict[str, object]) -> None:
    """Counts are equal, sums of floating-point numbers nearly."""
    fields = dict(vars(found))
    assert fields.pop("octave_counts") == expected["octave_counts"]
    assert fields == pytest.approx({name: expected[name] for name in fields}, rel=1e-11)
    assert set(expected) == {*fields, "octave_counts"}


def example(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Values over many octaves with zeros, some beyond their row's range, rounded to 1/8 of a step."""
    generator = torch.Generator().manual_seed(rows * columns)
    values = torch.randn(rows, columns, generator=generator) * torch.exp2(torch.arange(columns) % 23 - 18.0)
    values[torch.rand(rows, columns, generator=generator) < 0.1] = 0
    values[0, :RUN_VALUES] = 0
    values = values.to(dtype)
    scales = torch.exp2(torch.randint(-9, -5, (rows, 1), generator=generator).float())
    largest = scales * FORMAT_MAX
    dequantized = ((values.float() / scales * 8).round() / 8 * scales).clamp(-largest, largest)
    return values, dequantized, scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 32), (5, 70), (17, 129)])
@pytest.mark.parametrize("has_lost_blocks", [False, True])
def test_equal_to_a_slow_reference(rows: int, columns: int, dtype: torch.dtype, has_lost_blocks: bool) -> None:
    values, dequantized, scales = example(rows, columns, dtype)
    values[0, 0] = 0.77
    if has_lost_blocks:
        dequantized[1::3], scales[1::3] = 0, 0
    found = quantization_stats(values, dequantized, scales, FORMAT_MAX)
    check_equal(found, slow_stats(values, dequantized, scales))


def test_the_example_shows_every_kind_of_loss() -> None:
    stats = quantization_stats(*example(17, 129), FORMAT_MAX)
    assert 0 < stats.saturated_fraction < 0.5
    assert 0 < stats.underflow_fraction < 0.8
    assert stats.octave_counts[0] > 0


def test_statistics_of_parts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantization_stats(*example(17, 129), FORMAT_MAX)
    monkeypatch.setattr(quantization_error, "CHUNK_VALUES", 300)
    check_equal(quantization_stats(*example(17, 129), FORMAT_MAX), vars(whole))


def test_sqnr_without_error_is_infinite_and_without_signal_is_none() -> None:
    values = torch.tensor([[1.0, -2.0, 0.0]])
    exact = quantization_stats(values, values, torch.ones(()), FORMAT_MAX)
    assert exact.sqnr_db == exact.local_sqnr_db == math.inf
    nothing = quantization_stats(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(()), FORMAT_MAX)
    assert (nothing.sqnr_db, nothing.local_sqnr_db, nothing.scale_min, nothing.scale_spread_octaves) == (None,) * 4
    assert (nothing.underflow_fraction, nothing.saturated_fraction, sum(nothing.octave_counts)) == (0, 0, 0)


def test_scales_of_zeros_do_not_count() -> None:
    values = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    stats = quantization_stats(values, values, torch.tensor([[2.0**-127], [0.25]]), FORMAT_MAX)
    assert (stats.scale_min, stats.scale_max, stats.scale_spread_octaves) == (0.25, 0.25, 0)


def test_a_block_whose_scale_rounds_to_zero_underflows() -> None:
    """NVFP4's scales are E4M3 and underflow. The other blocks keep their scales, and zeros lose nothing."""
    values = torch.tensor([[1e-9, 2e-9, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    dequantized = values.where(values > 1e-3, 0.0)
    stats = quantization_stats(values, dequantized, torch.tensor([[0.0], [0.25], [0.0]]), FORMAT_MAX)
    assert (stats.scale_min, stats.scale_max, stats.scale_spread_octaves) == (0.25, 0.25, 0)
    assert (stats.underflow_fraction, stats.zero_scale_fraction) == (2 / 3, 2 / 3)
    assert stats.saturated_fraction == 0 and sum(stats.octave_counts) == 1


def test_nonfinite_values_are_counted_and_excluded() -> None:
    clean = torch.tensor([[1.5, -3.0, 0.0, 0.0, 0.0]])
    dirty = torch.tensor([[1.5, -3.0, math.inf, -math.inf, math.nan]])
    rounded = torch.tensor([[1.5, -2.5, 448.0, -448.0, math.nan]])
    found = quantization_stats(dirty, rounded, torch.ones(()), FORMAT_MAX)
    expected = quantization_stats(clean, torch.tensor([[1.5, -2.5, 0.0, 0.0, 0.0]]), torch.ones(()), FORMAT_MAX)
    assert found.num_non_finite == 3
    assert vars(found) == vars(expected) | {"num_non_finite": 3}


@pytest.mark.parametrize(
    ("magnitude", "entry"),
    [(448.0, 0), (1e30, 0), (224.1, 0), (224.0, 1), (1.75, 8), (448.0 * 2.0**-46, 46), (1e-30, NUM_OCTAVES - 1)],
)
def test_octaves_end_at_powers_of_two_below_the_largest(magnitude: float, entry: int) -> None:
    values = torch.tensor([magnitude])
    counts = quantization_stats(values, values, torch.ones(()), FORMAT_MAX).octave_counts
    assert [i for i, count in enumerate(counts) if count] == [entry]


def test_rounding_of_the_scale_is_not_saturation() -> None:
    """amax x (448 / amax) may be slightly above 448."""
    values = torch.tensor([448.0 * (1 + 2.0**-22), 448.0 * (1 + 2.0**-18)], dtype=torch.float64)
    stats = quantization_stats(values, values.clamp(max=448.0), torch.ones(()), FORMAT_MAX)
    assert stats.saturated_fraction == 0.5


def test_one_huge_value_dominates_the_sqnr_but_not_the_local_sqnr() -> None:
    values = torch.ones(4, 4 * RUN_VALUES)
    values[0, 0] = 1e6
    dequantized = torch.zeros_like(values)
    dequantized[0, 0] = 1e6
    stats = quantization_stats(values, dequantized, torch.ones(()), FORMAT_MAX)
    assert stats.sqnr_db is not None and stats.sqnr_db > 80
    assert stats.local_sqnr_db == 0


def test_other_shapes_are_refused() -> None:
    for values, dequantized in ((torch.ones(2), torch.ones(3)), (torch.ones(0), torch.ones(0))):
        with pytest.raises(ValueError, match="two non-empty tensors"):
            quantization_stats(values, dequantized, torch.ones(()), FORMAT_MAX)


def test_a_scalar_is_a_tensor_too() -> None:
    stats = quantization_stats(torch.tensor(3.0), torch.tensor(2.0), torch.ones(()), FORMAT_MAX)
    assert isinstance(stats, QuantizationStats)
    assert stats.max_abs_error == 1
