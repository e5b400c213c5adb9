"""What quantization did to a tensor, from plain tensors: the values, what became of them, and the scales between.

Two measures of the error, since one number misleads: `sqnr_db` is that of the whole tensor and hears its largest values
only; `local_sqnr_db` is the median over short runs of neighbours, and shows what became of everything else when a few
outliers took the range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

RUN_VALUES = 32
CHUNK_VALUES = 1 << 16  # half a MiB of FP64 each: what a core's cache holds
NUM_OCTAVES = 48
# FP32 scales round: the largest value may land a few units of its last place beyond what they express.
ROUNDING = 2.0**-20


@dataclass(frozen=True, kw_only=True)
class QuantizationStats:
    """One tensor under one quantization. Values that are not finite are counted, and left out of everything else.

    Attributes:
        num_values: all of them.
        num_non_finite: infinities and NaNs among them.
        amax: largest magnitude.
        scale_min, scale_max: of the dequantization scales, where neither they nor their values are zero; None if there
            are none.
        scale_spread_octaves: log2(scale_max / scale_min).
        underflow_fraction: became zero, of the values that are not zero.
        zero_scale_fraction: of the same, those that became zero because their scale did, and all of its block with it.
            NVFP4's scales can: they are E4M3, relative to the tensor's amax.
        saturated_fraction: lie beyond the largest number that their scale expresses, of all values.
        sqnr_db: 10 log10(sum x^2 / sum (x - x')^2); infinity without any error, None if all values are zero.
        local_sqnr_db: median of the same over runs of 32 neighbours in a row that are not all zero.
        max_abs_error: largest |x - x'|.
        octave_counts: entry i counts the values between 2^-(i + 1) and 2^-i of the largest number that their scale
            expresses, entry 0 all above it too, the last one everything smaller but zero. A format reaches down as
            many entries as it has octaves. Values whose scale is zero are in none.
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
    """Compare a tensor with what quantization left of it.

    Args:
        values: floating point, any shape; not empty.
        dequantized: the same shape.
        dequant_scales: scale of each value; any shape that expands to that of `values`.
        format_max: largest number of the format, before its scale.

    Numerics: sums in FP64.
    """
    if values.shape != dequantized.shape or not values.numel():
        raise ValueError(f"needs two tensors of one shape that is not empty, got {values.shape}, {dequantized.shape}")
    tally = _ErrorSums()
    for x, y, scale in _chunks(values, dequantized, dequant_scales.expand(values.shape)):
        tally.add(x, y, scale, format_max)
    return tally.result(values.numel())


def sqnr_db(signal: float, noise: float) -> Optional[float]:
    """Signal to quantization noise in dB, from their sums of squares; None without signal, infinity without noise."""
    if not signal:
        return None
    return 10 * math.log10(signal / noise) if noise else math.inf


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some whole rows of each tensor at a time, in FP64."""
    width = tensors[0].shape[-1] if tensors[0].ndim else 1
    rows = [tensor.reshape(-1, width) for tensor in tensors]
    step = max(1, CHUNK_VALUES // width)
    for start in range(0, len(rows[0]), step):
        yield tuple(each[start : start + step].double() for each in rows)


class _ErrorSums:
    """Sums over the chunks."""

    def __init__(self) -> None:
        self.signal = self.noise = self.amax = self.max_abs_error = 0.0
        self.scale_min, self.scale_max = math.inf, 0.0
        self.num_finite = self.num_nonzero = self.num_underflow = self.num_scaled = self.num_saturated = 0
        self.octaves = torch.zeros(NUM_OCTAVES, dtype=torch.int64)
        self.local: list[Tensor] = []

    def add(self, x: Tensor, y: Tensor, scale: Tensor, format_max: float) -> None:
        """Rows of values, dequantized values and scales."""
        is_finite = x.isfinite()
        x, y = x.where(is_finite, 0.0), y.where(is_finite, 0.0)
        magnitude, error = x.abs(), (x - y).abs()
        is_nonzero = magnitude > 0
        is_scaled = is_nonzero & (scale != 0)
        largest = scale * format_max
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
            used = scale[is_scaled]
            self.scale_min = min(self.scale_min, float(used.min()))
            self.scale_max = max(self.scale_max, float(used.max()))
            ratio = (largest[is_scaled] / magnitude[is_scaled]).clamp_(1.0, 2.0 ** (NUM_OCTAVES - 1))
            octaves = torch.frexp(ratio).exponent - 1  # the logarithm rounded down, exactly
            self.octaves += torch.bincount(octaves, minlength=NUM_OCTAVES).cpu()

    def result(self, num_values: int) -> QuantizationStats:
        """All sums as statistics."""
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
    """SQNR of each run of neighbours in a row that is not all zero; the last run of a row may be shorter."""
    padding = (0, -x.shape[1] % RUN_VALUES)
    signal, noise = (
        torch.nn.functional.pad(each.square(), padding).unflatten(1, (-1, RUN_VALUES)).sum(2).flatten()
        for each in (x, error)
    )
    is_used = signal > 0
    return 10 * torch.log10(signal[is_used] / noise[is_used])
