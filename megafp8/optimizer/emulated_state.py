"""Optimizer state in low precision on a CPU: the numbers of Transformer Engine's Adam, held in FP32.

On a GPU, `--use-precision-aware-optimizer` gives the state to Transformer Engine's Adam, which stores codes and a scale
for each tensor. Elsewhere Adam computes in FP32, and after each update its state is rounded to what the codes would
hold. Every value is then a code times its scale, while it takes four bytes: this shows what a format does to a run, and
saves no memory.

    moments    FP8 (E4M3) and FP16 with a scale for each tensor (`moment_dequant_scale`), or BF16
    masters    FP16 with a power of two for each tensor (`master_dequant_scale`), or FP32

A tensor is a rank's shard of a parameter, as in Transformer Engine. Checkpoints have the values in FP32. They are not
rounded when they are loaded, so that a run resumes bitwise; under another layout the next update rounds them with the
scales of other shards.

Model weights are those of the rounded masters. Transformer Engine writes them before it rounds the masters, so that a
weight may differ there by the double rounding.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megafp8.config.schema import OptimizerConfig
from megafp8.quantization.rounding import cast, decode
from megafp8.quantization.scaling import MOMENT_FORMAT_MAX, compute_amax, master_dequant_scale, moment_dequant_scale
from megafp8.recipes.formats import E4M3

MOMENTS = ("exp_avg", "exp_avg_sq")


def emulate_low_precision_state(settings: OptimizerConfig, optimizers: Iterable[Any]) -> None:
    """Round the state of megatron-core's optimizers after each update, as the dtype flags ask.

    Args:
        optimizers: distributed optimizers, whose Adam keeps FP32 state.
    """
    if not settings.use_precision_aware_optimizer:
        return
    dtypes = dict(zip(MOMENTS, (settings.exp_avg_dtype, settings.exp_avg_sq_dtype), strict=True))
    for part in optimizers:
        if part.is_stub_optimizer:
            continue
        masters = [each for group in part.shard_fp32_from_float16_groups for each in group]
        rounded = masters if settings.main_params_dtype == "fp16" else []
        part.optimizer.register_step_post_hook(partial(round_state, dtypes, rounded))


@torch.no_grad()
def round_state(dtypes: dict[str, str], masters: list[Tensor], optimizer: Any, *unused: Any) -> None:
    """Round moments and FP16 master weights in place, after an update.

    Args:
        dtypes: by the name of the moment: fp32, bf16, fp16 or fp8.
        masters: FP32 shards to round to FP16.
    """
    for state in optimizer.state.values():
        for name, dtype in dtypes.items():
            if dtype != "fp32" and name in state:
                state[name].copy_(rounded_moment(state[name], dtype))
    for master in masters:
        master.copy_(rounded_master(master))


def rounded_moment(values: Tensor, dtype: str) -> Tensor:
    """What a moment in FP32 becomes in a dtype.

    Numerics: nearest, ties to even. The largest magnitude is the largest number of the format, so that nothing
    saturates. NaN and infinity stay.
    """
    if dtype == "bf16" or not values.numel():
        return values.bfloat16().float()
    is_fp8 = dtype == "fp8"
    scale = moment_dequant_scale(compute_amax(values), MOMENT_FORMAT_MAX[torch.uint8 if is_fp8 else torch.float16])
    if not scale.isfinite():
        return values
    quant_scale = scale.reciprocal()
    if is_fp8:  # the codes are decoded with the reciprocal of the scale that wrote them
        return decode(cast(values * quant_scale, E4M3), E4M3, torch.float32).mul_(quant_scale.reciprocal())
    return (values * quant_scale).half().float().mul_(scale)


def rounded_master(values: Tensor) -> Tensor:
    """What FP32 master weights become in FP16 with a scale.

    Numerics: nearest, ties to even, 11 significant bits down to 2^-29 of the largest weight. NaN and infinity stay.
    """
    amax = compute_amax(values) if values.numel() else values.new_zeros(())
    if not amax.isfinite():
        return values
    scale = master_dequant_scale(amax)
    return (values * scale.reciprocal()).half().float().mul_(scale)
