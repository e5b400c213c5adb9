"""Statistics of tensors as numbers that ranks can add up, or take the largest of: one row a tensor.

Every rank has the same rows and fills those of its own layers, shards and samples. Two small reductions at the end of a
step bring all of them to rank 0, whatever the layout: sums of counts and squares, and maxima of amaxes and scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional, Union

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.metrics.quantization_error import RUN_VALUES, sqnr_db
from megafp8.metrics.records import TensorStats

LOCAL_DB_LIMIT = 60.0
MAX_EXPONENTS = 33  # E5M2's 32 exponent fields, and the zeros

# Of weights: squared norms of weight and update, codes, and gradients of few sequences and of the whole batch.
OF_WEIGHTS = ("weight", "update", "codes", "changed", "few_gradient", "all_gradient")
# Of quantization. `compared` counts what the next five are of: without high precision there is nothing to compare.
OF_VALUES = ("values", "non_finite", "compared", "nonzero", "underflow", "saturated", "signal", "noise", "local_db",
             "local_runs")  # fmt: skip
SUMS = {name: index for index, name in enumerate((*OF_WEIGHTS, *OF_VALUES))}
NUM_SUMS = len(SUMS) + MAX_EXPONENTS
OF_MAXIMA = ("amax", "quant_scale", "dequant_scale", "staleness")
LARGEST = {name: index for index, name in enumerate((*OF_MAXIMA, "outlier"))}

# The largest of these keys is the largest outlier's: octaves in units of 2^-10 above the channel's number, exact.
OCTAVE_UNITS, CHANNELS = 1 << 10, 1 << 24


class TensorStatistics(NamedTuple):
    """What a rank found of one tensor, on its device.

    Attributes:
        sums: FP64, those of OF_VALUES, then codes by exponent, at most MAX_EXPONENTS.
        largest: FP64, those of OF_MAXIMA; -inf where there is none.
        channel_amax: FP32 [columns]; None where nobody asked for it.
    """

    sums: Tensor
    largest: Tensor
    channel_amax: Optional[Tensor]


def build_statistics(
    sums: Mapping[str, Union[Tensor, float]],
    largest: Mapping[str, Union[Tensor, float]],
    exponents: Tensor,
    channel_amax: Optional[Tensor],
) -> TensorStatistics:
    """A tally from numbers by field; what is not there is 0, or -inf among the largest. Waits for the numbers."""
    numbers = [float(sums.get(field, 0.0)) for field in OF_VALUES]
    maxima = [float(largest.get(field, -math.inf)) for field in OF_MAXIMA]
    sums_of_values, maxima_of_values = (exponents.new_tensor(each, dtype=torch.float64) for each in (numbers, maxima))
    return TensorStatistics(torch.cat([sums_of_values, exponents.double()]), maxima_of_values, channel_amax)


class StatisticsTable:
    """Rows of sums and maxima, FP64 on the device until they are all copied to the host at once.

    Args:
        names: of the rows, the same on all ranks.
    """

    def __init__(self, names: Sequence[str], device: torch.device):
        self.rows = {name: index for index, name in enumerate(names)}
        self.sums = torch.zeros(len(names), NUM_SUMS, dtype=torch.float64, device=device)
        self.largest = torch.full((len(names), len(LARGEST)), -math.inf, dtype=torch.float64, device=device)
        self.added: dict[str, TensorStatistics] = {}
        self.channels: dict[tuple[int, int], dict[str, Tensor]] = {}

    def add(self, name: str, tally: TensorStatistics, first_channel: Optional[int] = None) -> None:
        """Take note of what this rank found of a tensor.

        Args:
            first_channel: number of the first column, where the tensor is a part of the columns; None leaves outliers
                out.
        """
        if name in self.added:
            self.enter()
        self.added[name] = tally
        if first_channel is not None:
            assert tally.channel_amax is not None
            self.channels.setdefault((len(tally.channel_amax), first_channel), {})[name] = tally.channel_amax

    def add_of_weights(self, field: str, names: Sequence[str], values: Union[Tensor, Sequence[float]]) -> None:
        """Enter one field of some rows at once: FP64 [rows] on the device, or numbers."""
        if names:
            torch._foreach_add_([self.sums[self.rows[name], SUMS[field]] for name in names], list(values))

    def enter(self) -> None:
        """Bring what was added into its rows, all tensors together, since every operation takes the host time; and find
        the outliers among the channels, those of one width together."""
        if self.added:
            start, rows = len(OF_WEIGHTS), [self.rows[name] for name in self.added]
            sums, largest, _ = zip(*self.added.values(), strict=True)
            of_sums = [self.sums[row, start : start + len(each)] for row, each in zip(rows, sums, strict=True)]
            torch._foreach_add_(of_sums, list(sums))
            torch._foreach_maximum_([self.largest[row, : len(OF_MAXIMA)] for row in rows], list(largest))
        self.added = {}
        for (_, first_channel), by_name in self.channels.items():
            keys = outlier_keys(torch.stack(list(by_name.values())), first_channel)
            entries = [self.largest[self.rows[name], LARGEST["outlier"]] for name in by_name]
            torch._foreach_maximum_(entries, list(keys))
        self.channels = {}

    def reduce(self) -> None:
        """Bring all ranks' parts to rank 0; all ranks call it."""
        self.enter()
        dist.reduce(self.sums, dst=0, op=dist.ReduceOp.SUM)
        dist.reduce(self.largest, dst=0, op=dist.ReduceOp.MAX)

    def to_host(self) -> None:
        """Copy everything to the host, which waits for the device once."""
        self.sums, self.largest = torch.cat([self.sums, self.largest], dim=1).cpu().tensor_split([NUM_SUMS], dim=1)

    def total(self, names: Sequence[str], field: str) -> float:
        """Sum of a field over some rows."""
        return sum(self.sums[self.rows[name], SUMS[field]].item() for name in names)

    def stats(self, name: str, fmt: str, num_exponents: int) -> Optional[TensorStats]:
        """A row as statistics; None if nobody saw the tensor.

        Args:
            fmt: name of the number format.
            num_exponents: entries of `exponent_counts`.
        """
        row = self.rows[name]
        values = self.sums[row].tolist()
        of = dict(zip(SUMS, values, strict=False))
        top = dict(zip(LARGEST, self.largest[row].tolist(), strict=True))
        if not of["values"]:
            return None
        is_compared, scale_max, dequant_max = of["compared"] > 0, top["quant_scale"], top["dequant_scale"]
        has_scale = scale_max > 0 and 0 < dequant_max < math.inf
        return TensorStats(
            format=fmt,
            num_values=int(of["values"]),
            num_non_finite=int(of["non_finite"]),
            amax=top["amax"],
            quant_scale_min=1 / dequant_max if has_scale else None,
            quant_scale_max=scale_max if has_scale else None,
            scale_spread_octaves=math.log2(scale_max) + math.log2(dequant_max) if has_scale else None,
            underflow_fraction=of["underflow"] / max(1, of["nonzero"]) if is_compared else None,
            saturated_fraction=of["saturated"] / of["compared"] if is_compared else None,
            sqnr_db=sqnr_db(of["signal"], of["noise"]) if is_compared else None,
            mean_local_sqnr_db=of["local_db"] / of["local_runs"] if of["local_runs"] else None,
            staleness_octaves=math.log2(top["staleness"]) if 0 < top["staleness"] < math.inf else None,
            outlier_octaves=top["outlier"] // CHANNELS / OCTAVE_UNITS if top["outlier"] >= 0 else None,
            outlier_channel=int(top["outlier"] % CHANNELS) if top["outlier"] >= 0 else None,
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
    """The largest channel and how far it is above the median channel, as one FP64 number; -1 where the median is 0.

    Args:
        channel_amax: FP32 [tensors, channels].
        first_channel: number of the first one, where a rank has a part of the channels.

    Returns:
        [tensors].
    """
    largest = channel_amax.max(dim=1)
    median = channel_amax.sort(dim=1).values[:, (channel_amax.shape[1] - 1) // 2]  # torch.median is not deterministic
    octaves = torch.log2(largest.values.double() / median.double())
    keys = (octaves * OCTAVE_UNITS).floor() * CHANNELS + first_channel + largest.indices
    return torch.where(torch.isfinite(keys), keys, -1.0)


def compare(values: Tensor, dequantized: Tensor, amax: Tensor) -> dict[str, Tensor]:
    """Signal and noise of finite values, over all and over runs of neighbours.

    Args:
        values, dequantized: FP32 [rows, columns].
        amax: FP32 scalar, by which they are divided, so that no square over- or underflows.

    Returns:
        FP64 scalars by field: signal and noise in units of amax squared.
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
    """Sums of the squares of runs of neighbours in a row, FP32; `tensor` is overwritten. A row's last run may be
    shorter."""
    padding = -tensor.shape[1] % RUN_VALUES
    squares = tensor.square_() if not padding else torch.nn.functional.pad(tensor.square_(), (0, padding))
    return squares.view(-1, RUN_VALUES).sum(1)


def exponent_counts(code_counts: Tensor, mantissa_bits: int, first_special_code: Optional[int]) -> Tensor:
    """Codes by exponent.

    Args:
        code_counts: [codes], how often each occurs, the sign being the top bit.
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
