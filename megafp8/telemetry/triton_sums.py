"""Signal and noise of a tensor in one pass over a GPU's memory: `tensor_sums.compare` for tensors that are not cut."""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.telemetry.quantization import RUN_VALUES
from megafp8.telemetry.tensor_sums import LOCAL_DB_LIMIT

FIELDS = ("signal", "noise", "local_db", "local_runs")
RUNS = 64  # at a time
PROGRAMS = 2048  # at most; few enough for their sums to be added at no cost
DB_OF_OCTAVE = tl.constexpr(3.010299956639812)


@triton.jit
def compare_kernel(
    values, decoded, factors, amaxes, sums, columns, runs_per_row, num_runs, HAS_FACTOR: tl.constexpr,
    RUNS: tl.constexpr, RUN_VALUES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Four sums of each program, over every `num_programs`-th group of runs."""
    amax = tl.load(amaxes)
    unit = 1.0 / tl.where(amax > 0, amax, 1.0)
    unit = tl.minimum(unit, 3.4028234663852886e38)
    if HAS_FACTOR:
        factor = tl.load(factors)
    else:
        factor = 1.0
    signals = tl.zeros([RUNS], tl.float32)
    noises = tl.zeros([RUNS], tl.float32)
    decibels = tl.zeros([RUNS], tl.float32)
    counts = tl.zeros([RUNS], tl.float32)
    for start in range(tl.program_id(0) * RUNS, num_runs, tl.num_programs(0) * RUNS):
        run = start + tl.arange(0, RUNS)
        column = (run % runs_per_row)[:, None] * RUN_VALUES + tl.arange(0, RUN_VALUES)[None, :]
        mask = (run < num_runs)[:, None] & (column < columns)
        place = (run // runs_per_row).to(tl.int64)[:, None] * columns + column
        x = tl.load(values + place, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(decoded + place, mask=mask, other=0.0).to(tl.float32) * factor
        is_finite = tl.abs(x) < float("inf")  # false for NaN
        error = tl.where(is_finite, (y - x) * unit, 0.0)
        x = tl.where(is_finite, x * unit, 0.0)
        signal = tl.sum(x * x, 1)
        noise = tl.sum(error * error, 1)
        is_used = signal > 0
        ratio = tl.where(is_used, signal, 1.0) / tl.where(noise > 0, noise, 1.0)
        db = tl.minimum(tl.maximum(tl.log2(ratio) * DB_OF_OCTAVE, 0.0), LIMIT)
        db = tl.where(noise > 0, db, LIMIT)
        signals += signal
        noises += noise
        decibels += tl.where(is_used, db, 0.0)
        counts += is_used.to(tl.float32)
    own = sums + tl.program_id(0) * 4
    tl.store(own, tl.sum(signals))
    tl.store(own + 1, tl.sum(noises))
    tl.store(own + 2, tl.sum(decibels))
    tl.store(own + 3, tl.sum(counts))


def compare_whole(values: Tensor, decoded: Tensor, factor: Optional[Tensor], amax: Tensor) -> dict[str, Tensor]:
    """Signal and noise of the finite values of a tensor, over all and over runs of neighbours.

    Args:
        values: FP32, BF16 or FP16 [rows, columns], contiguous, on a GPU.
        decoded: what quantization made of them, any of these types, the same shape.
        factor: FP32 scalar that `decoded` is still to be multiplied with; None for 1.
        amax: FP32 scalar, the largest finite magnitude.

    Returns:
        FP64 scalars by field: signal and noise in units of amax squared.
    """
    runs_per_row = triton.cdiv(values.shape[1], RUN_VALUES)
    num_runs = values.shape[0] * runs_per_row
    programs = min(PROGRAMS, triton.cdiv(num_runs, RUNS))
    sums = torch.empty(programs, len(FIELDS), dtype=torch.float32, device=values.device)
    compare_kernel[(programs,)](
        values.contiguous(), decoded.contiguous(), factor, amax, sums, values.shape[1], runs_per_row, num_runs,
        HAS_FACTOR=factor is not None, RUNS=RUNS, RUN_VALUES=RUN_VALUES, LIMIT=LOCAL_DB_LIMIT,
    )  # fmt: skip
    return dict(zip(FIELDS, sums.sum(0, dtype=torch.float64), strict=True))
