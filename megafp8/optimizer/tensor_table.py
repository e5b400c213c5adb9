"""Rows of the Adam kernel's tensor table: gradient, weights and moments of a parameter's shard on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class MomentScale:
    """Scales of an FP16 or FP8 moment in Transformer Engine's Adam, FP32 tensors of one element.

    Attributes:
        nominal: dequant scale in the optimizer's `_scales`.
        dequant: dequant scale of the stored codes; with FP8 the rounded inverse of `quant`, with FP16 `nominal`.
        quant: inverse of `nominal`; None with FP16.
    """

    nominal: Tensor
    dequant: Tensor
    quant: Optional[Tensor]


@dataclass(frozen=True)
class ParameterRow:
    """The shard of one parameter that this rank updates. All tensors have the same number of elements.

    Attributes:
        grad: FP32 or BF16.
        master: FP32 weight, or the 16-bit remainder of it without the BF16 `model` (rounded to nearest, ties away).
        exp_avg: first moment in FP32 or BF16, or scaled in FP16 or E4M3 (uint8 codes).
        exp_avg_sq: second moment, likewise.
        model: the model weight; None where it is `master`, or where another kernel writes it.
        scales: of the two moments; None for FP32 and BF16.
    """

    grad: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    model: Optional[Tensor]
    scales: tuple[Optional[MomentScale], Optional[MomentScale]] = (None, None)

    @property
    def dtypes(self) -> tuple[Optional[torch.dtype], ...]:
        """Dtypes of `tensors`; None for a missing tensor."""
        return tuple(None if tensor is None else tensor.dtype for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[Optional[Tensor], ...]:
        """The columns of the kernel's table."""
        return self.grad, self.master, self.exp_avg, self.exp_avg_sq, self.model


def build_rows(part: MegatronOptimizer, group_index: int) -> list[tuple[torch.nn.Parameter, Tensor, ParameterRow]]:
    """Of each parameter of a group: the model weight, the key of its optimizer state, and its row.

    Args:
        part: megatron-core's distributed optimizer, or the optimizer of parameters of which this rank has rows.
    """
    is_flat = isinstance(part, DistributedOptimizer)
    build = build_row if is_flat else build_local_row
    return [(weight, key, build(part, weight, key)) for weight, key in weights_of_group(part, group_index)]


def weights_of_group(part: MegatronOptimizer, group_index: int) -> list[tuple[torch.nn.Parameter, Tensor]]:
    """The model weights of a parameter group, each with the tensor that the optimizer updates: the key of its state."""
    if isinstance(part, DistributedOptimizer):
        weights = [*part.model_fp32_groups[group_index], *part.model_float16_groups[group_index]]
        return list(zip(weights, part.optimizer.param_groups[group_index]["params"], strict=True))
    if isinstance(part, FP32Optimizer):
        return [(weight, weight) for weight in part.optimizer.param_groups[group_index]["params"]]
    masters = zip(part.float16_groups[group_index], part.fp32_from_float16_groups[group_index], strict=True)
    return [*masters, *((weight, weight) for weight in part.fp32_from_fp32_groups[group_index])]


def build_local_row(part: MegatronOptimizer, weight: DTensor, master: DTensor) -> ParameterRow:
    """Build the row of one parameter of which this rank has rows. `master` is `weight` in FP32."""
    state = get_state(part.optimizer, master)
    return ParameterRow(
        grad=flat(weight.main_grad), master=flat(master), exp_avg=flat(state["exp_avg"]),
        exp_avg_sq=flat(state["exp_avg_sq"]), model=None if weight is master else flat(weight),
    )  # fmt: skip


def flat(tensor: Tensor) -> Tensor:
    """A tensor's elements on this rank in one dimension, with the same memory."""
    return to_local_if_dtensor(tensor.detach()).view(-1)


def build_row(part: DistributedOptimizer, model_param: torch.nn.Parameter, shard: Tensor) -> ParameterRow:
    """Build the row of one parameter. `shard` is the key of its optimizer state."""
    param_range = part._get_model_param_range_map(model_param)["param"]
    state = get_state(part.optimizer, shard)
    moments = [get_moment(part.optimizer, shard, name) for name in ("exp_avg", "exp_avg_sq")]
    return ParameterRow(
        grad=model_param.main_grad.view(-1)[param_range.start : param_range.end],
        master=state.get("master_param", shard),
        exp_avg=moments[0][0],
        exp_avg_sq=moments[1][0],
        model=get_model_weight(part, model_param, shard),
        scales=(moments[0][1], moments[1][1]),
    )


def get_model_weight(part: DistributedOptimizer, model_param: torch.nn.Parameter, shard: Tensor) -> Optional[Tensor]:
    """The shard of the 16-bit model weight that the update writes; None in FP32, where it is `shard`, and in FP8."""
    if shard.dtype == torch.bfloat16:  # the optimizer state has the master weight
        return shard.detach()
    if model_param.dtype == torch.float32 or is_float8tensor(model_param):
        return None
    # The part of the parameter buffer that the gather sends.
    buffer_index, _, bucket_index = part.model_param_gbuf_map[model_param]
    bucket = part.buffers[buffer_index].buckets[bucket_index]
    world = part._get_model_param_range_map(model_param)["gbuf_world_in_bucket"]
    return bucket.param_data.view(-1)[world.start : world.end]


def get_moment(optimizer: torch.optim.Optimizer, shard: Tensor, name: str) -> tuple[Tensor, Optional[MomentScale]]:
    """The tensor of a moment for the kernel, and its scale if it has one."""
    stored = optimizer.state[shard][name]
    if hasattr(stored, "_quantizer"):  # FP8
        return stored._data, MomentScale(optimizer._scales[shard][name], stored._scale_inv, stored._quantizer.scale)
    if stored.dtype == torch.float16:
        dequant_scale = optimizer._scales[shard][name]
        return stored, MomentScale(dequant_scale, dequant_scale, None)
    return stored, None


def get_state(optimizer: torch.optim.Optimizer, shard: Tensor) -> dict[str, Tensor]:
    """The optimizer state of a parameter; moments are initialized with zeros if there is none."""
    state = optimizer.state[shard]
    if not state and hasattr(optimizer, "initialize_state"):
        optimizer.initialize_state(shard, optimizer.store_param_remainders and shard.dtype == torch.bfloat16)
        state = optimizer.state[shard]
    elif not state:
        state |= {name: torch.zeros_like(shard) for name in ("exp_avg", "exp_avg_sq")}
    return state
