"""Quantization error of a tensor, from its values, the dequantized values and the scales.

The error has two measures. `sqnr_db` is that of the whole tensor, which its largest values dominate. `local_sqnr_db` is
the median over short runs of neighbours, and shows the error of the other values if a few outliers use up the range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

RUN_VALUES = 32
CHUNK_VALUES = 1 << 16  # half a MiB of FP64, which fits a core's cache
NUM_OCTAVES = 48
# FP32 scales are rounded, so the largest value may exceed what they express by a few units in the last place.
ROUNDING = 2.0**-20


@dataclass(frozen=True, kw_only=True)
class QuantizationStats:
    """One tensor under one quantization. Values that are not finite are counted, and left out of everything else.

    Attributes:
        num_non_finite: infinities and NaNs.
        scale_min, scale_max: of the nonzero dequantization scales with nonzero values; None without any.
        scale_spread_octaves: log2(scale_max / scale_min).
        underflow_fraction: of the nonzero values, those that became zero.
        zero_scale_fraction: of the nonzero values, those that became zero because their scale is zero. NVFP4's block
            scales can be: they are E4M3, relative to the tensor's amax.
        saturated_fraction: of all values, those beyond the largest number that their scale expresses.
        sqnr_db: 10 log10(sum x^2 / sum (x - x')^2); infinity without any error, None if all values are zero.
        local_sqnr_db: median of the same over runs of 32 neighbours in a row that are not all zero.
        max_abs_error: largest |x - x'|.
        octave_counts: entry i counts the values between 2^-(i + 1) and 2^-i of the largest number that their scale
            expresses. Entry 0 includes larger values, the last entry all smaller nonzero ones. Values whose scale is
            zero are left out.
    """

    num_values: int
    num_non_finite: int
    amax: float
    scale_min: Optional[float]
    scale_max: Optional[float]
    scale_spread_octaves: Optional[float]
    underflow_fraction: float
    zero_scale_fraction: float
    saturated_fraction: float
    sqnr_db: Optional[float]
    local_sqnr_db: Optional[float]
    max_abs_error: float
    octave_counts: tuple[int, ...]


@torch.no_grad()
def quantization_stats(
    values: Tensor, dequantized: Tensor, dequant_scales: Tensor, format_max: float
) -> QuantizationStats:
    """Compare a tensor with its dequantized values.

    Args:
        values: floating point, any shape, not empty.
        dequantized: of the same shape.
        dequant_scales: scale of each value, in any shape that expands to that of `values`.
        format_max: largest number of the format, without the scale.

    Raises:
        ValueError: the shapes differ, or the tensor is empty.

    Numerics: sums in FP64.
    """
    if values.shape != dequantized.shape or not values.numel():
        raise ValueError(f"expected two non-empty tensors of equal shape, got {values.shape} and {dequantized.shape}")
    sums = _ErrorSums()
    for x, y, scale in _chunks(values, dequantized, dequant_scales.expand(values.shape)):
        sums.add(x, y, scale, format_max)
    return sums.result(values.numel())


def sqnr_db(signal: float, noise: float) -> Optional[float]:
    """Signal-to-quantization-noise ratio in dB of two sums of squares; None without signal, infinity without noise."""
    if not signal:
        return None
    return 10 * math.log10(signal / noise) if noise else math.inf


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Chunks of complete rows of each tensor, in FP64."""
    width = tensors[0].shape[-1] if tensors[0].ndim else 1
    rows = [tensor.reshape(-1, width) for tensor in tensors]
    step = max(1, CHUNK_VALUES // width)
    for start in range(0, len(rows[0]), step):
        yield tuple(each[start : start + step].double() for each in rows)


class _ErrorSums:
    """Sums over the chunks of a tensor."""

    def __init__(self) -> None:
        self.signal = self.noise = self.amax = self.max_abs_error = 0.0
        self.scale_min, self.scale_max = math.inf, 0.0
        self.num_finite = self.num_nonzero = self.num_underflow = self.num_scaled = self.num_saturated = 0
        self.octaves = torch.zeros(NUM_OCTAVES, dtype=torch.int64)
        self.local: list[Tensor] = []

    def add(self, x: Tensor, y: Tensor, dequant_scale: Tensor, format_max: float) -> None:
        """Add rows of values, dequantized values and scales."""
        is_finite = x.isfinite()
        x, y = x.where(is_finite, 0.0), y.where(is_finite, 0.0)
        magnitude, error = x.abs(), (x - y).abs()
        is_nonzero = magnitude > 0
        is_scaled = is_nonzero & (dequant_scale != 0)
        largest = dequant_scale * format_max
        self.num_finite += int(is_finite.sum())
        self.num_nonzero += int(is_nonzero.sum())
        self.num_underflow += int((is_nonzero & (y == 0)).sum())
        self.num_scaled += int(is_scaled.sum())
        self.num_saturated += int((is_scaled & (magnitude > largest * (1 + ROUNDING))).sum())
        self.signal += float(x.square().sum())
        self.noise += float(error.square().sum())
        self.amax = max(self.amax, float(magnitude.max()))
        self.max_abs_error = max(self.max_abs_error, float(error.max()))
        self.local.append(_local_sqnr_db(x, error))
        if is_scaled.any():
            used = dequant_scale[is_scaled]
            self.scale_min = min(self.scale_min, float(used.min()))
            self.scale_max = max(self.scale_max, float(used.max()))
            ratio = (largest[is_scaled] / magnitude[is_scaled]).clamp_(1.0, 2.0 ** (NUM_OCTAVES - 1))
            octaves = torch.frexp(ratio).exponent - 1  # floor(log2), exactly
            self.octaves += torch.bincount(octaves, minlength=NUM_OCTAVES).cpu()

    def result(self, num_values: int) -> QuantizationStats:
        """The statistics of all chunks."""
        local = torch.cat(self.local)
        has_scale = 0 < self.scale_min < math.inf
        return QuantizationStats(
            num_values=num_values,
            num_non_finite=num_values - self.num_finite,
            amax=self.amax,
            scale_min=self.scale_min if has_scale else None,
            scale_max=self.scale_max if has_scale else None,
            scale_spread_octaves=math.log2(self.scale_max / self.scale_min) if has_scale else None,
            underflow_fraction=self.num_underflow / max(1, self.num_nonzero),
            zero_scale_fraction=(self.num_nonzero - self.num_scaled) / max(1, self.num_nonzero),
            saturated_fraction=self.num_saturated / num_values,
            sqnr_db=sqnr_db(self.signal, self.noise),
            local_sqnr_db=float(local.median()) if len(local) else None,
            max_abs_error=self.max_abs_error,
            octave_counts=tuple(self.octaves.tolist()),
        )


def _local_sqnr_db(x: Tensor, error: Tensor) -> Tensor:
    """SQNR of each run of neighbours in a row that is not all zero. The last run of a row may be shorter."""
    padding = (0, -x.shape[1] % RUN_VALUES)
    signal, noise = (
        torch.nn.functional.pad(each.square(), padding).unflatten(1, (-1, RUN_VALUES)).sum(2).flatten()
        for each in (x, error)
    )
    is_used = signal > 0
    return 10 * torch.log10(signal[is_used] / noise[is_used])
