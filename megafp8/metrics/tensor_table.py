"""Table of tensor statistics that are reduced over ranks by sums and maxima, one row per tensor.

All ranks have the same rows. Each fills the rows of its layers, shards and samples. At the end of a statistics step,
two reductions bring the table to rank 0 under any parallel layout: sums of counts and squares, and maxima of amaxes and
scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.metrics.quantization_error import RUN_VALUES, sqnr_db
from megafp8.metrics.records import TensorStats
from megafp8.recipes.formats import E5M2, Format


def num_exponents(fmt: Format) -> int:
    """Entries of `exponent_counts`: zeros, and the exponent fields of a format."""
    return 1 + (1 << fmt.exponent_bits)


LOCAL_DB_LIMIT = 60.0
MAX_EXPONENTS = num_exponents(E5M2)

# Of a weight: squared norms of weight and update, numbers of codes and of changed codes, and squared norms of the
# gradients of a few sequences and of the global batch.
WEIGHT_SUMS = ("weight", "update", "codes", "changed", "few_gradient", "all_gradient")
# Of quantization. `compared` counts the values behind the following fields; it is 0 without high-precision values.
QUANTIZATION_SUMS = ("values", "non_finite", "compared", "nonzero", "underflow", "saturated", "signal", "noise",
                     "local_db", "local_runs")  # fmt: skip
SUMS = {name: index for index, name in enumerate((*WEIGHT_SUMS, *QUANTIZATION_SUMS))}
NUM_SUMS = len(SUMS) + MAX_EXPONENTS
QUANTIZATION_MAXIMA = ("amax", "quant_scale", "dequant_scale", "staleness")
MAXIMA = {name: index for index, name in enumerate((*QUANTIZATION_MAXIMA, "outlier"))}

# An outlier key holds octaves, in units of 2^-10, above the channel number. FP64 holds it exactly. The largest key is
# that of the largest outlier.
OCTAVE_UNITS, CHANNELS = 1 << 10, 1 << 24


class PartialStats(NamedTuple):
    """Sums and maxima of one tensor on this rank and its device.

    Attributes:
        sums: FP64, the QUANTIZATION_SUMS, then codes by exponent, at most MAX_EXPONENTS.
        maxima: FP64, the QUANTIZATION_MAXIMA; -inf without a value.
        channel_amax: FP32 [columns]; None if outliers are not wanted.
    """

    sums: Tensor
    maxima: Tensor
    channel_amax: Optional[Tensor]


def build_partial_stats(
    sums: Mapping[str, Union[Tensor, float]],
    maxima: Mapping[str, Union[Tensor, float]],
    exponents: Tensor,
    channel_amax: Optional[Tensor],
) -> PartialStats:
    """`PartialStats` from values by field; missing sums are 0, missing maxima -inf. Synchronizes with the device."""
    values = [float(sums.get(field, 0.0)) for field in QUANTIZATION_SUMS]
    largest = [float(maxima.get(field, -math.inf)) for field in QUANTIZATION_MAXIMA]
    as_tensor = partial(torch.tensor, dtype=torch.float64, device=exponents.device)
    return PartialStats(torch.cat([as_tensor(values), exponents.double()]), as_tensor(largest), channel_amax)


class StatisticsTable:
    """Rows of sums and maxima in FP64 on the device, at the same addresses in every statistics step.

    Args:
        names: of the rows, the same on all ranks.
    """

    def __init__(self, names: Sequence[str], device: torch.device):
        self.rows = {name: index for index, name in enumerate(names)}
        self.sums = torch.zeros(len(names), NUM_SUMS, dtype=torch.float64, device=device)
        self.maxima = torch.full((len(names), len(MAXIMA)), -math.inf, dtype=torch.float64, device=device)
        self.pending: dict[str, PartialStats] = {}
        self.channels: dict[tuple[int, int], dict[str, Tensor]] = {}

    def clear(self) -> None:
        """Clear all rows."""
        self.pending, self.channels = {}, {}
        self.sums.zero_()
        self.maxima.fill_(-math.inf)

    def add(self, name: str, stats: PartialStats, first_channel: Optional[int] = None) -> None:
        """Add the statistics of a tensor on this rank; `flush` brings them into the rows.

        Args:
            first_channel: number of the first column, if the tensor is a shard of the columns; None skips outliers.
        """
        if name in self.pending:
            self.flush()
        self.pending[name] = stats
        if first_channel is not None:
            assert stats.channel_amax is not None
            self.channels.setdefault((len(stats.channel_amax), first_channel), {})[name] = stats.channel_amax

    def add_weight_sums(self, field: str, names: Sequence[str], values: Union[Tensor, Sequence[float]]) -> None:
        """Add to one field of some rows: FP64 [rows] on the device, or numbers."""
        if names:
            torch._foreach_add_([self.sums[self.rows[name], SUMS[field]] for name in names], list(values))

    def flush(self) -> None:
        """Add the pending statistics to their rows and find the outlier channels.

        All tensors, and all outlier searches of one width, share their operations, since each launch takes host time.
        """
        if self.pending:
            start, rows = len(WEIGHT_SUMS), [self.rows[name] for name in self.pending]
            sums, maxima, _ = zip(*self.pending.values(), strict=True)
            targets = [self.sums[row, start : start + len(each)] for row, each in zip(rows, sums, strict=True)]
            torch._foreach_add_(targets, list(sums))
            torch._foreach_maximum_([self.maxima[row, : len(QUANTIZATION_MAXIMA)] for row in rows], list(maxima))
        self.pending = {}
        for (_, first_channel), by_name in self.channels.items():
            keys = outlier_keys(torch.stack(list(by_name.values())), first_channel)
            entries = [self.maxima[self.rows[name], MAXIMA["outlier"]] for name in by_name]
            torch._foreach_maximum_(entries, list(keys))
        self.channels = {}

    def reduce(self) -> None:
        """Reduce the table to rank 0; a collective call."""
        self.flush()
        dist.reduce(self.sums, dst=0, op=dist.ReduceOp.SUM)
        dist.reduce(self.maxima, dst=0, op=dist.ReduceOp.MAX)

    def to_host(self) -> StatisticsTable:
        """A copy on the host, made with one synchronization."""
        copy = StatisticsTable(list(self.rows), torch.device("cpu"))
        copy.sums, copy.maxima = torch.cat([self.sums, self.maxima], dim=1).cpu().tensor_split([NUM_SUMS], dim=1)
        return copy

    def total(self, names: Sequence[str], field: str) -> float:
        """Sum of a field over some rows."""
        return sum(self.sums[self.rows[name], SUMS[field]].item() for name in names)

    def stats(self, name: str, fmt: str, num_exponents: int) -> Optional[TensorStats]:
        """Statistics of a row; None if no rank added the tensor.

        Args:
            fmt: name of the number format.
            num_exponents: entries of `exponent_counts`.
        """
        row = self.rows[name]
        values = self.sums[row].tolist()
        sums = dict(zip(SUMS, values, strict=False))
        maxima = dict(zip(MAXIMA, self.maxima[row].tolist(), strict=True))
        if not sums["values"]:
            return None
        is_compared, scale_max, dequant_max = sums["compared"] > 0, maxima["quant_scale"], maxima["dequant_scale"]
        has_scale = scale_max > 0 and 0 < dequant_max < math.inf
        octaves, channel = divmod(maxima["outlier"], CHANNELS)
        return TensorStats(
            format=fmt,
            num_values=int(sums["values"]),
            num_non_finite=int(sums["non_finite"]),
            amax=maxima["amax"],
            quant_scale_min=1 / dequant_max if has_scale else None,
            quant_scale_max=scale_max if has_scale else None,
            scale_spread_octaves=math.log2(scale_max) + math.log2(dequant_max) if has_scale else None,
            underflow_fraction=sums["underflow"] / max(1, sums["nonzero"]) if is_compared else None,
            saturated_fraction=sums["saturated"] / sums["compared"] if is_compared else None,
            sqnr_db=sqnr_db(sums["signal"], sums["noise"]) if is_compared else None,
            mean_local_sqnr_db=sums["local_db"] / sums["local_runs"] if sums["local_runs"] else None,
            staleness_octaves=math.log2(maxima["staleness"]) if 0 < maxima["staleness"] < math.inf else None,
            outlier_octaves=octaves / OCTAVE_UNITS if maxima["outlier"] >= 0 else None,
            outlier_channel=int(channel) if maxima["outlier"] >= 0 else None,
            exponent_counts=tuple(int(count) for count in values[len(SUMS) : len(SUMS) + num_exponents]),
        )

    def update_stats(self, names: Sequence[str]) -> dict[str, Optional[float]]:
        """`update_to_weight` and `codes_changed_fraction` over the weights of some rows."""
        weight, update = (self.total(names, field) for field in ("weight", "update"))
        codes, changed = (self.total(names, field) for field in ("codes", "changed"))
        return {
            "update_to_weight": math.sqrt(update / weight) if weight else None,
            "codes_changed_fraction": changed / codes if codes else None,
        }


def outlier_keys(channel_amax: Tensor, first_channel: int = 0) -> Tensor:
    """Keys of the largest channel and its distance to the median channel; -1 if the median is 0.

    Args:
        channel_amax: FP32 [tensors, channels].
        first_channel: number of the first one, if the rank has a shard of the channels.

    Returns:
        FP64 [tensors].
    """
    largest = channel_amax.max(dim=1)
    median = channel_amax.sort(dim=1).values[:, (channel_amax.shape[1] - 1) // 2]  # torch.median is not deterministic
    octaves = torch.log2(largest.values.double() / median.double())
    keys = (octaves * OCTAVE_UNITS).floor() * CHANNELS + first_channel + largest.indices
    return torch.where(torch.isfinite(keys), keys, -1.0)


def error_sums(values: Tensor, dequantized: Tensor, amax: Tensor) -> dict[str, Tensor]:
    """Signal and noise, over all values and over runs of neighbours.

    Args:
        values, dequantized: FP32 [rows, columns], finite.
        amax: FP32 scalar that divides both, so that no square over- or underflows.

    Returns:
        Scalars by field; signal and noise are FP64 in units of amax squared.
    """
    factor = torch.where(amax > 0, amax, 1.0).reciprocal().clamp_(max=torch.finfo(torch.float32).max)
    signal, noise = (_squares_of_runs(each) for each in (values * factor, (dequantized - values).mul_(factor)))
    decibels = (10 * torch.log10(signal / noise)).clamp_(0.0, LOCAL_DB_LIMIT)
    is_used = signal > 0
    return {
        "signal": signal.sum(dtype=torch.float64),
        "noise": noise.sum(dtype=torch.float64),
        "local_db": torch.where(is_used, decibels, 0.0).sum(dtype=torch.float64),
        "local_runs": is_used.sum(),
    }


def _squares_of_runs(tensor: Tensor) -> Tensor:
    """FP32 sums of squares over runs of neighbours in a row, the last of which may be shorter. Overwrites `tensor`."""
    padding = -tensor.shape[1] % RUN_VALUES
    squares = torch.nn.functional.pad(tensor.square_(), (0, padding)) if padding else tensor.square_()
    return squares.view(-1, RUN_VALUES).sum(1)


def exponent_counts(code_counts: Tensor, mantissa_bits: int, first_special_code: Optional[int]) -> Tensor:
    """Counts of codes by exponent.

    Args:
        code_counts: [codes], how often each code occurs; the sign is the top bit.
        first_special_code: smallest positive code that is infinity or NaN.

    Returns:
        [1 + exponent fields]: zeros, subnormals, then the other exponent fields.
    """
    magnitudes = code_counts.view(2, -1).sum(0)
    if first_special_code is not None:
        magnitudes[first_special_code:] = 0
    by_exponent = magnitudes.view(-1, 1 << mantissa_bits).sum(1)
    by_exponent[0] -= magnitudes[0]
    return torch.cat([magnitudes[:1], by_exponent])
