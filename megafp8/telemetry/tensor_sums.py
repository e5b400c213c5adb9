"""Statistics of tensors as numbers that ranks can add up, or take the largest of: one row a tensor.

Every rank has the same rows and fills those of its own layers, shards and samples. Two small reductions at the end of a
step bring all of them to rank 0, whatever the layout: sums of counts and squares, and maxima of amaxes and scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.telemetry.quantization import RUN_VALUES, sqnr_db
from megafp8.telemetry.records import TensorStats

LOCAL_DB_LIMIT = 60.0
MAX_EXPONENTS = 33  # E5M2's 32 exponent fields, and the zeros

# Of quantization. `compared` counts what the next five are of: without high precision there is nothing to compare.
OF_VALUES = ("values", "non_finite", "compared", "nonzero", "underflow", "saturated", "signal", "noise", "local_db",
             "local_runs")  # fmt: skip
# Of weights: squared norms of weight and update, codes, and gradients of few sequences and of the whole batch.
OF_WEIGHTS = ("weight", "update", "codes", "changed", "few_gradient", "all_gradient")
SUMS = {name: index for index, name in enumerate((*OF_VALUES, *OF_WEIGHTS))}
NUM_SUMS = len(SUMS) + MAX_EXPONENTS
LARGEST = {name: index for index, name in enumerate(("amax", "quant_scale", "dequant_scale", "staleness", "outlier"))}

# The largest of these keys is the largest outlier's: octaves in units of 2^-10 above the channel's number, exact.
OCTAVE_UNITS, CHANNELS = 1 << 10, 1 << 24


class TensorTable:
    """Rows of sums and maxima, FP64 on the device.

    Args:
        names: of the rows, the same on all ranks.
    """

    def __init__(self, names: Sequence[str], device: torch.device):
        self.rows = {name: index for index, name in enumerate(names)}
        self.sums = torch.zeros(len(names), NUM_SUMS, dtype=torch.float64, device=device)
        self.largest = torch.full((len(names), len(LARGEST)), -math.inf, dtype=torch.float64, device=device)
        self._places: dict[tuple[str, ...], Tensor] = {}

    def add(
        self,
        name: str,
        sums: dict[str, Tensor],
        largest: Optional[dict[str, Tensor]] = None,
        exponents: Optional[Tensor] = None,
    ) -> None:
        """Enter what this rank found of a tensor: scalars on the device by field, and counts by exponent."""
        row = self.rows[name]
        self.sums[row].index_add_(0, self.places(SUMS, tuple(sums)), stacked(sums))
        if exponents is not None:
            self.sums[row, len(SUMS) : len(SUMS) + len(exponents)] += exponents
        if largest:
            self.largest[row].scatter_reduce_(0, self.places(LARGEST, tuple(largest)), stacked(largest), "amax")

    def places(self, columns: dict[str, int], fields: tuple[str, ...]) -> Tensor:
        """Numbers of some columns, on the device; copied there once, since such a copy waits for the device."""
        if fields not in self._places:
            self._places[fields] = torch.tensor([columns[field] for field in fields], device=self.sums.device)
        return self._places[fields]

    def reduce(self) -> None:
        """Bring all ranks' parts to rank 0; all ranks call it."""
        dist.reduce(self.sums, dst=0, op=dist.ReduceOp.SUM)
        dist.reduce(self.largest, dst=0, op=dist.ReduceOp.MAX)

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


def stacked(values: dict[str, Tensor]) -> Tensor:
    """Scalars of any types as one FP64 vector."""
    return torch.stack([value.double() for value in values.values()])


def outlier_key(channel_amax: Tensor, first_channel: int = 0) -> Tensor:
    """The largest channel and how far it is above the median channel, as one FP64 number; -1 where the median is 0.

    Args:
        channel_amax: FP32 [channels].
        first_channel: number of the first one, where a rank has a part of the channels.
    """
    median = channel_amax.median()
    octaves = torch.log2(channel_amax.amax().double() / median.double())
    key = (octaves * OCTAVE_UNITS).floor() * CHANNELS + first_channel + channel_amax.argmax()
    return torch.where(torch.isfinite(key), key, -1.0)


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
