"""A parameter as Adam's kernel takes it: what of gradient, weights and state lies on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


@dataclass(frozen=True)
class Scale:
    """The scale of an FP16 or FP8 moment as Transformer Engine's Adam keeps it: FP32 tensors of one number each.

    Attributes:
        noted: dequant scale that was chosen.
        dequant: what is multiplied with stored numbers; with FP8 the inverse of `quant`, with FP16 `noted` itself.
        quant: the inverse of `noted`; None with FP16.
    """

    noted: Tensor
    dequant: Tensor
    quant: Optional[Tensor]


@dataclass(frozen=True)
class ParameterRow:
    """One parameter, or the part of it that this rank updates; all tensors have as many elements.

    Attributes:
        grad: FP32 or BF16.
        master: FP32 weight; or, in 16 bits, what the BF16 `model` lacks of it (rounded to nearest, ties away).
        exp_avg: first moment: FP32 or BF16; or divided by a scale, FP16 or codes of E4M3 (uint8).
        exp_avg_sq: second moment, alike.
        model: the weight that the model computes with; None where `master` is that, or where another kernel writes it.
        scales: of the two moments; None for one in FP32 or BF16.
    """

    grad: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    model: Optional[Tensor]
    scales: tuple[Optional[Scale], Optional[Scale]] = (None, None)

    @property
    def dtypes(self) -> tuple[Optional[torch.dtype], ...]:
        """In the order of `tensors`; None where there is none."""
        return tuple(None if tensor is None else tensor.dtype for tensor in self.tensors)

    @property
    def tensors(self) -> tuple[Optional[Tensor], ...]:
        """As the columns of a kernel's table."""
        return self.grad, self.master, self.exp_avg, self.exp_avg_sq, self.model


def row_of(part: DistributedOptimizer, model: torch.nn.Parameter, shard: Tensor) -> ParameterRow:
    """What one parameter's update reads and writes on this rank."""
    place = part._get_model_param_range_map(model)
    state = state_of(part.optimizer, shard)
    moments = [moment_of(part.optimizer, shard, name) for name in ("exp_avg", "exp_avg_sq")]
    return ParameterRow(
        grad=model.main_grad.view(-1)[place["param"].start : place["param"].end],
        master=state.get("master_param", shard),
        exp_avg=moments[0][0],
        exp_avg_sq=moments[1][0],
        model=model_weight_of(part, model, shard),
        scales=(moments[0][1], moments[1][1]),
    )


def model_weight_of(part: DistributedOptimizer, model: torch.nn.Parameter, shard: Tensor) -> Optional[Tensor]:
    """What of the model's own weight an update writes: in BF16, and not the master weight itself."""
    if shard.dtype == torch.bfloat16:  # the optimizer keeps the master weight beside the model's own
        return shard.detach()
    if model.dtype != torch.bfloat16 or is_float8tensor(model):
        return None
    buffer_index, _, bucket_index = part.model_param_gbuf_map[model]
    bucket = part.buffers[buffer_index].buckets[bucket_index]
    world = part._get_model_param_range_map(model)["gbuf_world_in_bucket"]
    return bucket.param_data.view(-1)[world.start : world.end]


def moment_of(optimizer: torch.optim.Optimizer, shard: Tensor, name: str) -> tuple[Tensor, Optional[Scale]]:
    """A moment as the kernel takes it, and its scale if it has one."""
    stored = optimizer.state[shard][name]
    if hasattr(stored, "_quantizer"):  # FP8
        return stored._data, Scale(optimizer._scales[shard][name], stored._scale_inv, stored._quantizer.scale)
    if stored.dtype == torch.float16:
        noted = optimizer._scales[shard][name]
        return stored, Scale(noted, noted, None)
    return stored, None


def state_of(optimizer: torch.optim.Optimizer, shard: Tensor) -> dict[str, Tensor]:
    """The moments of a parameter, and its master weight where the optimizer keeps it; zeros at first."""
    state = optimizer.state[shard]
    if not state and hasattr(optimizer, "initialize_state"):
        optimizer.initialize_state(shard, optimizer.store_param_remainders and shard.dtype == torch.bfloat16)
        state = optimizer.state[shard]
    elif not state:
        state |= {name: torch.zeros_like(shard) for name in ("exp_avg", "exp_avg_sq")}
    return state
