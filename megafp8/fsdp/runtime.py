"""What data-parallel ranks do with a model whose parameters are sharded (`mcore/torch_fsdp.py` has the wrapper).

Checkpoints have the rows of a parameter that a rank keeps as parts of the complete tensor. megatron-core's sharded
state dict gives the rows of most parameters their places, so that any layout can load them. Three things are missing.
It loads plain tensors, which a DTensor cannot take. And 0.16 splits the rows of a gated MLP's `linear_fc1` on each rank
into a gate and an up half, although the first half of the ranks has gate rows only, and the second half up rows only.
0.19 does not split them. With replicas, all of them claim to have the copy that is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch.distributed.tensor import DTensor

from megafp8.config.data_parallel import strategy_of
from megafp8.config.schema import RunConfig
from megafp8.fsdp.codes import give_codes
from megafp8.fsdp.gradients import (
    CountedGather,
    CountedReduction,
    ReducedGradientMonitor,
    add_reduction_hook,
    check_replica_in_node,
    reduce_in_fp8,
)
from megafp8.mcore.config import build_ddp_config
from megafp8.mcore.layer_runtime import LayerRuntime
from megafp8.mcore.torch_fsdp import TorchFSDP, agree_on_overflow, fsdp_modules, rows_found_by_identity
from megafp8.optimizer.data_parallel import DataParallelRuntime
from megafp8.optimizer.fp8_gradients import Fp8Reduction, GradientCodes
from megafp8.optimizer.node_reduction import NodeGroups
from megafp8.optimizer.received_bytes import ReceivedBytes
from megafp8.resilience import fault_injection


class FsdpRuntime(DataParallelRuntime):
    """The runtime of chunks that are a `TorchFSDP`."""

    def wrap(
        self, config: RunConfig, core: TransformerConfig, layers: LayerRuntime, chunks: Sequence[torch.nn.Module]
    ) -> list[TorchFSDP]:
        ddp_config, num_replicas = build_ddp_config(config), strategy_of(config.parallel).num_replicas
        sharded = [TorchFSDP(core, ddp_config, chunk, num_replicas) for chunk in chunks]
        for chunk in sharded:
            chunk.data_parallel = self
            if config.precision.fp8_param_gather:
                give_codes(chunk, *layers.codes_to_gather(config, chunk))
        return sharded

    def finish_optimizers(self, parts: Iterable[Any]) -> None:
        agree_on_overflow(parts)

    def reduce_in_fp8(
        self,
        chunk: TorchFSDP,
        is_unquantized: Callable[[Any], bool],
        settings: GradientCodes,
        step: Fp8Reduction,
        nodes: Optional[NodeGroups],
    ) -> None:
        if nodes is not None:
            check_replica_in_node(dist.get_process_group_ranks(chunk.process_group), nodes.ranks_per_node)
        reduce_in_fp8(chunk, is_unquantized, settings, step, None if nodes is None else nodes.dtype)

    def gradient_monitor(self, config: RunConfig, chunks: list[Any], device: torch.device) -> ReducedGradientMonitor:
        return ReducedGradientMonitor(chunks, device, is_local=config.precision.grad_reduce_in_fp8)

    def inject_faults(self, chunks: Sequence[TorchFSDP]) -> None:
        """The gradients are those of a module in a microbatch."""
        for sums in (sums for chunk in chunks for sums in chunk.sums):
            add_reduction_hook(sums.module, lambda gradients: fault_injection.poison("step.gradients", gradients))

    def parameter_traffic(self, config: RunConfig, chunks: list[Any]) -> ReceivedBytes:
        return CountedGather(chunks)

    def gradient_traffic(self, chunks: list[Any]) -> ReceivedBytes:
        return CountedReduction(chunks)

    def drop_gathered(self, chunk: TorchFSDP) -> None:
        """What `--torch-fsdp2-no-reshard-after-forward` keeps. Rows are gathered before each use."""
        for module in fsdp_modules(chunk):
            module.reshard()

    def sharding_group(self, chunk: TorchFSDP) -> dist.ProcessGroup:
        group: dist.ProcessGroup = chunk.process_group
        return group

    def place_rows(self, chunk: TorchFSDP, state: dict[str, Any]) -> dict[str, Any]:
        group = chunk.process_group
        state = {
            name: gated_rows(leaf, group) if isinstance(leaf, ShardedTensorFactory) else leaf
            for name, leaf in state.items()
        }
        if chunk.replicas is not None:
            # Only one replica is saved. The copies of other replicas are numbered after those of its ranks.
            first = group.size() * chunk.replicas.group.rank()
            for leaf in nested_values(state):
                leaf.replica_id = (*leaf.replica_id[:-1], leaf.replica_id[-1] + first)
        return state

    def optimizer_rows(self) -> AbstractContextManager[None]:
        return rows_found_by_identity()

    def model_rows(self, chunk: TorchFSDP, state: dict[str, Any]) -> dict[str, Any]:
        """DTensors where the parameters of the chunk are DTensors."""
        parameters = dict(unwrap_model(chunk).named_parameters())
        return {name: as_dtensor(value, parameters.get(name)) for name, value in state.items()}

    def set_optimizer_rows(self, part: Any, state: dict[str, Any]) -> None:
        """DTensors like the parameters of the optimizer."""
        parameters = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
        inner = state.get("optimizer", state)["state"]
        for index, values in inner.items():
            if isinstance(values, dict):
                inner[index] = {name: as_dtensor(value, parameters[index]) for name, value in values.items()}
        for masters, loaded in zip(
            getattr(part, "fp32_from_float16_groups", ()), state.get("fp32_from_fp16_params", ()), strict=True
        ):
            loaded[:] = [as_dtensor(rows, master) for rows, master in zip(loaded, masters, strict=True)]


def gated_rows(factory: ShardedTensorFactory, group: dist.ProcessGroup) -> ShardedTensor | ShardedTensorFactory:
    """Place this rank's rows of a gated MLP's `linear_fc1`.

    The complete tensor has the gate rows of all tensor-parallel ranks, then their up rows. A tensor-parallel rank has
    gate and up rows, which R data-parallel ranks divide: rank r < R / 2 has part r of the gate rows.
    """
    # megatron-core 0.16 cuts this rank's rows in half. The numbers of the first half tell where the rows belong.
    gate, *up = factory.build()
    # One leaf: nothing was cut.
    if not up:
        return gate
    axis = gate.prepend_axis_num
    rank, half = group.rank(), group.size() // 2
    assert group.size() == 2 * half or group.size() == 1
    if group.size() == 1:
        return factory
    # Its number among the gate halves is: tensor-parallel rank x ranks of the group + rank.
    tensor_rank = gate.global_offset[axis] // gate.local_shape[0] // group.size()
    num_parts = gate.axis_fragmentations[axis] // 2
    # First all gate rows, by tensor-parallel rank, then all up rows.
    part = (0 if rank < half else num_parts // 2) + tensor_rank * half + rank % half
    layers = [(dim, gate.global_offset[dim], gate.axis_fragmentations[dim]) for dim in range(axis)]
    return ShardedTensor.from_rank_offsets(
        factory.key,
        factory.data,
        *layers,
        (axis, part, num_parts),
        replica_id=factory.replica_id,
        prepend_axis_num=axis,
    )


def as_dtensor(rows: Any, like: Any) -> Any:
    """This rank's rows as a DTensor with the placement of `like`; `rows` itself if they need none."""
    if not (isinstance(like, DTensor) and isinstance(rows, torch.Tensor)) or isinstance(rows, DTensor):
        return rows
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
