"""What data-parallel ranks do with a model whose parameters are sharded (`mcore/torch_fsdp.py` has the wrapper).

Checkpoints have a rank's rows as parts of the complete tensor, which any layout can load. megatron-core's sharded state
dict lacks three things: it loads plain tensors, which a DTensor cannot take; 0.16 splits a rank's rows of a gated MLP
into a gate and an up half, although the rank has rows of one of them; and all replicas claim to have the saved copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Optional

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megafp8.config.schema import ParallelConfig
from megafp8.fsdp import gradients
from megafp8.mcore.layer_runtime import CodesOf
from megafp8.mcore.torch_fsdp import TorchFSDP, agree_on_overflow, dtensor_like, fsdp_modules, fsdp_parameters
from megafp8.optimizer.data_parallel import CodesOfChunk, DataParallelRuntime, Excludes
from megafp8.optimizer.fp8_gradients import Fp8Reduction, GradientCodes
from megafp8.optimizer.received_bytes import ReceivedBytes
from megafp8.quantization.fp8_parameter import GatheredCodes, quantize_codes
from megafp8.resilience import fault_injection


class FsdpRuntime(DataParallelRuntime):
    """The runtime of chunks that are a `TorchFSDP`."""

    def wrap(
        self, core: Any, ddp: Any, parallel: ParallelConfig, chunks: Sequence[Any], codes_of: CodesOfChunk
    ) -> list[Any]:
        sharded = [TorchFSDP(core, ddp, chunk, parallel.num_replicas) for chunk in chunks]
        for chunk in sharded:
            chunk.data_parallel = self
            if ddp.fp8_param_gather:
                give_codes(chunk, *codes_of(chunk))
        return sharded

    def finish_optimizers(self, parts: Iterable[Any]) -> None:
        agree_on_overflow(parts)

    def send_codes(self, chunk: Any, excludes: Excludes, codes: GradientCodes, step: Fp8Reduction, nodes: Any) -> None:
        if nodes is not None:
            gradients.check_replica_in_node(dist.get_process_group_ranks(chunk.process_group), nodes.ranks_per_node)
        for sums in chunk.sums:
            unquantized = [excludes(parameter) for parameter in sums.parameters]
            sums.module.set_custom_reduce_scatter(
                gradients.Fp8ReduceScatter(chunk, sums, unquantized, codes, step)
                if nodes is None
                else gradients.ReplicaReduceScatter(nodes.dtype, step)
            )
        if chunk.replicas is not None:
            chunk.replicas = gradients.QuantizedReplicaSums(chunk, excludes, codes, step)

    def inject_faults(self, chunks: Sequence[Any]) -> None:
        """The gradients are those of a module in a microbatch."""
        for sums in (sums for chunk in chunks for sums in chunk.sums):
            gradients.add_reduction_hook(sums.module, lambda values: fault_injection.poison("step.gradients", values))

    def gather_traffic(self, chunks: list[Any]) -> ReceivedBytes:
        return gradients.CountedGather(chunks)

    def reduction_traffic(self, chunks: list[Any]) -> ReceivedBytes:
        return gradients.CountedReduction(chunks)

    def drop_gathered(self, chunk: Any) -> None:
        """What `--torch-fsdp2-no-reshard-after-forward` keeps. Rows are gathered before each use."""
        for module in fsdp_modules(chunk):
            module.reshard()

    def sharding_group(self, chunk: Any) -> Any:
        return chunk.process_group

    def place_rows(self, chunk: Any, state: dict[str, Any]) -> dict[str, Any]:
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

    def model_rows(self, chunk: Any, state: dict[str, Any]) -> dict[str, Any]:
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
        masters, loaded = getattr(part, "fp32_from_float16_groups", ()), state.get("fp32_from_fp16_params", ())
        for like, rows in zip(masters, loaded, strict=True):
            rows[:] = [as_dtensor(each, master) for each, master in zip(rows, like, strict=True)]


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
    axes = [(dim, gate.global_offset[dim], gate.axis_fragmentations[dim]) for dim in range(axis)]
    return ShardedTensor.from_rank_offsets(
        factory.key, factory.data, *axes, (axis, part, num_parts), replica_id=factory.replica_id, prepend_axis_num=axis
    )


def as_dtensor(rows: Any, like: Any) -> Any:
    """This rank's rows as a DTensor with the placement of `like`; `rows` itself if they need none."""
    if not (isinstance(like, DTensor) and isinstance(rows, torch.Tensor)) or isinstance(rows, DTensor):
        return rows
    return dtensor_like(like, rows)


# ---- Weights gathered as FP8 codes -----------------------------------------------------------------------------------
# A rank keeps its rows of a weight in BF16, which the optimizer updates. Before the first forward pass of a step:
#
#   1. each rank computes the amaxes of its rows
#   2. one MAX all-reduce gives those of the complete weights, and every rank the same scales
#   3. each rank quantizes its rows; one byte an element
#
# FSDP2 then gathers the codes of a layer when it is used, forward and backward, in place of BF16. The linear reads the
# gathered codes, so that a run is bitwise that of a gather in BF16.


def give_codes(chunk: Any, codes: Mapping[Any, CodesOf], is_quantized: Callable[[], bool]) -> None:
    """Let FSDP2 gather the codes of some linears (`--fp8-param-gather`).

    torch's extension point is a pair of functions on the local tensor of a sharded parameter, `fsdp_pre_all_gather` and
    `fsdp_post_all_gather`. What FSDP2 sets on the module after a gather is a `QuantizedParameter` for emulated linears,
    and a tensor of Transformer Engine for its own (`te/gathered_codes.py`).

    Args:
        chunk: a `TorchFSDP`.
        codes: by linear.
        is_quantized: whether a forward pass finds the weights quantized already.
    """
    for record in [record for module in fsdp_modules(chunk) for record in fsdp_parameters(module)]:
        info = record._module_info
        if info.module in codes and info.param_name == "weight":
            of_weight = codes[info.module](record._sharded_local_tensor, record._orig_size)
            extend(record, of_weight)
            chunk.quantized_weights.append((of_weight, record))
    chunk.register_forward_pre_hook(partial(quantize_rows, is_quantized))


def extend(record: Any, codes: GatheredCodes) -> None:
    """Let FSDP2 gather codes for one of its parameters."""
    rows = record._sharded_local_tensor

    def pre_all_gather(mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        return (codes.own,), None

    def post_all_gather(
        outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Optional[Tensor] = None
    ) -> Any:
        # `.data`: FSDP2 writes the storage again before the backward pass, with the same codes.
        gathered = outputs[0].data
        if out is None:
            return codes.build_parameter(gathered), ()
        return codes.renew(out, gathered)

    rows.fsdp_pre_all_gather, rows.fsdp_post_all_gather = pre_all_gather, post_all_gather
    record._init_extensions()


def quantize_rows(is_quantized: Callable[[], bool], chunk: nn.Module, *unused: Any) -> None:
    """Quantize this rank's rows of all weights, once in a step. Collective over the data-parallel ranks.

    With delayed scaling the scales change within a step, after which its other microbatches still use the old ones.
    """
    if is_quantized():
        return
    group: dist.ProcessGroup = chunk.process_group
    weights = [codes for codes, _ in chunk.quantized_weights]
    rows = [record._sharded_local_tensor for _, record in chunk.quantized_weights]
    assert all(hasattr(each, "fsdp_pre_all_gather") for each in rows), "rows were replaced: gathers in BF16"
    shards = [each.detach().flatten() for each in rows]
    quantize_codes(weights, shards, [group.rank() * shard.numel() for shard in shards], group)
