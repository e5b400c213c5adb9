"""The optimizer's kernel, compared with the bytes that it must move and with megatron-core's optimizer.

    python benchmarks/gpu_adam.py [--parameters 1.4e9] [--sweep]

Weights have the shapes of a model, with FP32 gradients and state, and BF16 copies. The bandwidth of a plain copy on the
same GPU is printed first. `average` is an update of the moving average of the weights (`--ema-decay`). `--sweep` also
measures other block sizes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor

from benchmarks import timing
from megafp8.kernels import adam as adam_kernel
from megafp8.kernels.adam import AdamStep, TensorTable, squared_sum, update_rows
from megafp8.kernels.ema import update_means
from megafp8.optimizer.moment_scales import MomentScales
from megafp8.optimizer.tensor_table import MomentScale, ParameterRow
from megafp8.quantization.scaling import MOMENT_FORMAT_MAX

LAYER = (2048 * 3 * 2048, 2048 * 2048, 2048 * 2 * 5632, 5632 * 2048, 2048, 2048)
AHEAD = 2_000_000  # cycles, about 1 ms: the host has queued a call by then
NUMBERS = AdamStep(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10, clip=0.9)
STATES = (
    ("FP32", (torch.float32, torch.float32), False),
    ("BF16, remainders", (torch.bfloat16, torch.bfloat16), True),
    ("FP8 and FP16, remainders", (torch.uint8, torch.float16), True),
)
SWEEP = tuple(itertools.product((512, 1024, 2048, 4096), (4, 8)))


def seconds(call: Callable[[], Any], repeats: int = 8) -> float:
    """Median time of a call on the GPU, without that of its launch."""
    call()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times)[len(times) // 2]


def copy_bandwidth() -> float:
    """TB/s of a plain copy, read and written bytes together."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source)) / 1e12


def scale_of(moments: torch.dtype) -> Optional[MomentScale]:
    """The scale of one moment of a type, if it has one."""
    if moments not in MOMENT_FORMAT_MAX:
        return None
    noted, dequant, quant = torch.ones(3, 1, device="cuda")
    return MomentScale(noted, dequant, quant) if moments == torch.uint8 else MomentScale(noted, noted, None)


def rows_of(num_parameters: float, moments: Sequence[torch.dtype], remainders: bool) -> list[ParameterRow]:
    """Layers until there are so many parameters; a row for each weight."""
    rows: list[ParameterRow] = []
    for size in itertools.cycle(LAYER):
        if sum(row.grad.numel() for row in rows) >= num_parameters:
            return rows
        grad = torch.randn(size, device="cuda")
        master = torch.zeros(size, device="cuda", dtype=torch.int16 if remainders else torch.float32)
        states = [torch.zeros(size, device="cuda", dtype=dtype) for dtype in moments]
        exp_avg_scale, exp_avg_sq_scale = map(scale_of, moments)
        model = torch.randn(size, device="cuda").bfloat16()
        rows.append(ParameterRow(grad, master, *states, model, (exp_avg_scale, exp_avg_sq_scale)))
    return rows


def bytes_of(rows: Sequence[ParameterRow]) -> int:
    """What an update reads and writes: all once each, except gradients that are only read, and BF16 weights that are
    only written where the master weight is whole. For scales, gradients and the moments that have them once more."""
    total = 0
    for row in rows:
        moments = (row.exp_avg, row.exp_avg_sq)
        total += row.grad.nbytes + 2 * (row.master.nbytes + sum(moment.nbytes for moment in moments))
        total += row.model.nbytes * (2 if row.master.dtype == torch.int16 else 1)
        scaled = [moment.nbytes for moment in moments if moment.dtype in MOMENT_FORMAT_MAX]
        total += row.grad.nbytes + sum(scaled) if scaled else 0
    return total


def update(table: TensorTable, scales: Optional[MomentScales], factor: Tensor) -> None:
    """One update, after the scales of its moments."""
    update_rows(table, factor, NUMBERS, None if scales is None else scales.update(factor, NUMBERS))


def averaging(rows: Sequence[ParameterRow], dtype: torch.dtype) -> tuple[float, int]:
    """Seconds of an update of the moving average, and the bytes that it must read and write."""
    is_split = rows[0].master.dtype == torch.int16
    means = [torch.zeros_like(row.master, dtype=dtype) for row in rows]
    weights = [(row.master, row.model if is_split else None) for row in rows]
    table = TensorTable([(*each, mean) for each, mean in zip(weights, means, strict=True)], adam_kernel.BLOCK)
    positions = torch.zeros(len(rows), dtype=torch.int64, device="cuda")
    moved = sum(4 * mean.numel() + 2 * mean.nbytes for mean in means)
    return seconds(lambda: update_means(table, positions, 0.001, 1)), moved


def megatron_passes(rows: Sequence[ParameterRow]) -> dict[str, float]:
    """Seconds of each of megatron-core's passes with Transformer Engine's kernels."""
    import transformer_engine.pytorch  # noqa: F401 - loads the extension module that comes next
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.optimizers import multi_tensor_applier

    overflow = torch.zeros(1, dtype=torch.int, device="cuda")
    grads, masters, exp_avgs, exp_avg_sqs, models = (
        list(column) for column in zip(*(row.tensors for row in rows), strict=True)
    )
    scale = (tex.multi_tensor_scale, overflow, [grads, grads], 0.999)
    states = [grads, masters, exp_avgs, exp_avg_sqs]
    adam = (tex.multi_tensor_adam, overflow, states, 1e-4, 0.9, 0.95, 1e-8, 10, 1, 1, 0.1)
    return {
        "divide": seconds(lambda: torch._foreach_mul_(grads, 0.999)),
        "norm": seconds(lambda: multi_tensor_applier(tex.multi_tensor_l2norm, overflow, [grads], False)),
        "clip": seconds(lambda: multi_tensor_applier(*scale)),
        "Adam": seconds(lambda: multi_tensor_applier(*adam)),
        "copy": seconds(lambda: [model.copy_(master) for model, master in zip(models, masters, strict=True)]),
        "zero": seconds(lambda: torch._foreach_zero_(grads)),
    }


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=1.4e9, help="elements")
    parser.add_argument("--sweep", action="store_true", help="other block sizes too")
    options = parser.parse_args(argv)
    factor = torch.ones(1, device="cuda")
    cells: list[tuple[Any, ...]] = [("copy of 1 GiB", "", "", copy_bandwidth())]
    for name, moments, remainders in STATES:
        rows = rows_of(options.parameters, moments, remainders)
        scales = MomentScales(rows) if any(rows[0].scales) else None
        sizes = SWEEP if options.sweep and not remainders else ()
        default = (adam_kernel.BLOCK, adam_kernel.NUM_WARPS)
        for shape in (default, *sizes):
            adam_kernel.BLOCK, adam_kernel.NUM_WARPS = shape
            table = TensorTable([row.tensors for row in rows], shape[0])
            time_s = seconds(lambda table=table, scales=scales: update(table, scales, factor))
            cells.append((f"one pass, {name}", "x".join(map(str, shape)), time_s * 1e3, bytes_of(rows) / time_s / 1e12))
        adam_kernel.BLOCK, adam_kernel.NUM_WARPS = default
        for dtype in (torch.float32, torch.bfloat16):
            time_s, moved = averaging(rows, dtype)
            cells.append((f"average in {str(dtype).removeprefix('torch.')}", "", time_s * 1e3, moved / time_s / 1e12))
        if not remainders:
            grads = TensorTable([(row.grad,) for row in rows], adam_kernel.SUM_CHUNK)
            time_s = seconds(lambda grads=grads: squared_sum(grads, factor))
            cells.append(("squared sum", "", time_s * 1e3, sum(row.grad.nbytes for row in rows) / time_s / 1e12))
            passes = megatron_passes(rows)
            cells += [(f"megatron-core: {name}", "", time_s * 1e3, "") for name, time_s in passes.items()]
        del rows, table, scales
        torch.cuda.empty_cache()
    print(torch.cuda.get_device_name())
    print(timing.format_table(("what", "block x warps", "ms", "TB/s"), cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
