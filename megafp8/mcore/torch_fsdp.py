"""Fully sharded data parallelism: megatron-core's wrapper of torch's FSDP2, with gradients as megatron-core's DDP has.

Each data-parallel rank keeps rows [r n / R, (r + 1) n / R) of every parameter, and the same rows of its gradient,
master weight and moments. FSDP2 gathers the parameters of a layer before they are used, and reduce-scatters their
gradients in the backward pass of every microbatch.

Hybrid sharding (`--num-distributed-optimizer-instances N`): R ranks are a replica, of which there are N. Gathers and
reduce-scatters are within a replica, which is all that FSDP2 knows of: its own all-reduce between replicas has the
dtype of the gradients, and is repeated in every microbatch or comes with a second buffer of sums. Here the sums of rank
r over all microbatches are added between the replicas once in a step (`ReplicaSums`), from the backward pass of the
last microbatch on.

megatron-core 0.16.1's wrapper needs five changes, which `TorchFSDP` makes:
- It asks for a device mesh of CUDA devices. On a CPU machine the mesh has CPU devices.
- Its gradients are means over the ranks. Here they are sums, and `scale_gradients`, which is empty there, divides them
  by the tokens of the global batch.
- It reduces and accumulates gradients in the dtype of the parameters. Here both use the dtype of the gradients in
  `DistributedDataParallelConfig` (`GradientSums`): `main_grad` of each parameter is their sum over the microbatches.
- It shards an embedding that is tied to the output layer in a group of its own, so the output layer finds it sharded.
  Here embedding and output layer are in the group of the model, which is gathered during the complete forward pass.
- Its `finish_grad_sync` does not take the argument that `finalize_model_grads` passes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import torch_fully_sharded_data_parallel as wrapper
from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import to_local_if_dtensor
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def fsdp_modules(*chunks: torch.nn.Module) -> Iterator[FSDPModule]:
    """The modules of chunks whose parameters FSDP2 gathers together."""
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, FSDPModule))


def fsdp_parameters(module: FSDPModule) -> list[Any]:
    """FSDP2's own record of each parameter that it gathers for a module, in the order in which it packs them.

    Torch 2.11 has one group of parameters for a module. Later versions can have several, but have one here.
    """
    group = parameter_group(module)
    return [] if group is None else group.fsdp_params


def parameter_group(module: FSDPModule) -> Any:
    """FSDP2's own record of the parameters of a module; None if it has none."""
    return module._get_fsdp_state()._fsdp_param_group


class GradientSums:
    """Gradients of the parameters of a module, summed over the ranks and over the microbatches of a step.

    FSDP2 hands over the sums over the ranks before it rounds them to the dtype of the parameters. The first microbatch
    of a step overwrites those of the last step, so that nothing sets them to zero. `main_grad` of a parameter is its
    part.

    Args:
        module: has parameters.
        dtype: of the sums; None for that of the parameters.
        on_added: called after the gradients of a microbatch are added, on the stream of the hook.

    Attributes:
        parameters: of the module, sharded.
        sizes: elements of each of them on this rank.
        rows: their sums, flat, in this order.
    """

    def __init__(self, module: FSDPModule, dtype: Optional[torch.dtype], on_added: Callable[[GradientSums], None]):
        self.module, self._on_added = module, on_added
        self.parameters: list[DTensor] = [record.sharded_param for record in fsdp_parameters(module)]
        self.sizes = [parameter.to_local().numel() for parameter in self.parameters]
        first = self.parameters[0].to_local()
        self._group = parameter_group(module)
        self.rows = torch.zeros(sum(self.sizes), dtype=dtype or first.dtype, device=first.device)
        self._is_overwritten = True
        for parameter, rows in zip(self.parameters, self.rows.split(self.sizes), strict=True):
            parameter.main_grad = dtensor_like(parameter, rows.view(parameter.to_local().shape))
            parameter.register_post_accumulate_grad_hook(free_gradient)
        # FSDP2 calls the hook after its reduce-scatter, with the sums in `reduce_dtype`, and rounds them to the dtype
        # of the parameters afterwards.
        module.set_all_reduce_hook(self._add)

    def start(self) -> None:
        """Let the next gradients overwrite the sums."""
        self._is_overwritten = True

    def finish(self) -> None:
        """Set the sums to zero if no gradient came since `start`."""
        if self._is_overwritten:
            # Otherwise the gradients of the last step would be applied again.
            self.rows.zero_()

    def multiply(self, factor: Any) -> None:
        """Multiply the sums."""
        self.rows.mul_(factor)

    def _add(self, gradients: Tensor) -> None:
        assert gradients.numel() == self.rows.numel(), "a gradient is missing, or padded"
        if self._is_overwritten:
            self.rows.copy_(gradients)
        else:
            self.rows.add_(gradients)
        self._is_overwritten = False
        self._on_added(self)
        # FSDP2 calls this on another stream than that of its reductions, and frees the gradients after it. The next
        # reduction may get their memory, so it has to wait until they are read. Both may add to the counts of codes.
        streams = self._group.comm_ctx
        streams.reduce_scatter_stream.wait_stream(streams.all_reduce_stream)


class ReplicaSums:
    """Adds the sums of hybrid sharding's replicas once in a step: by all-reduces, in the dtype of the sums.

    Args:
        group: ranks that have the same rows, one of each replica.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self._works: dict[GradientSums, Any] = {}

    def start(self, sums: GradientSums) -> None:
        """Start to add sums of a step that are complete on this replica."""
        assert sums not in self._works, "gradients were added after their sums were sent"
        self._works[sums] = self._send(sums)

    def finish(self, all_sums: Sequence[GradientSums]) -> None:
        """Start those to which the last microbatch of the step added nothing, and wait for all."""
        for sums in all_sums:
            if sums not in self._works:
                self.start(sums)
        self._wait(list(self._works.values()))
        self._works.clear()

    def _send(self, sums: GradientSums) -> Any:
        return dist.all_reduce(sums.rows, group=self.group, async_op=True)

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait()


def dtensor_like(like: DTensor, rows: Tensor) -> DTensor:
    """This rank's rows as a DTensor with the placement of another."""
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def free_gradient(parameter: DTensor) -> None:
    """Free what FSDP2 sets as the gradient of a parameter: the sums have it."""
    parameter.grad = None


class TorchFSDP(TorchFullyShardedDataParallel):
    """A model chunk whose parameters are sharded over the data-parallel ranks.

    Args:
        ddp_config: `TorchFullyShardedDataParallelConfig`.
        chunk: on the device of this rank, and complete.
        num_replicas: over which the data-parallel ranks are divided.

    Attributes:
        process_group: ranks that have other rows of the same replica.
        replicas: adds the sums of the ranks that have the same rows; None with one replica.
        is_last_microbatch: of a step, so that sums are complete after its backward pass.
        quantized_weights: weights that are gathered as codes, each with FSDP2's record of it.
    """

    bucket_groups: tuple[Any, ...] = ()

    def __init__(self, config: TransformerConfig, ddp_config: Any, chunk: torch.nn.Module, num_replicas: int = 1):
        device = next(chunk.parameters()).device
        # Without it FSDP2 reduces in the dtype of the gradients.
        grad_dtype = torch.float32 if ddp_config.grad_reduce_in_fp32 else None
        group, replica_group = replica_groups(num_replicas)
        with wrapper_arguments(device.type, MixedPrecisionPolicy(reduce_dtype=grad_dtype)):
            # The wrapper shards the modules while it is built, so that both arguments have to be in place before.
            super().__init__(config, ddp_config, chunk, sub_modules_to_wrap={TransformerLayer}, process_group=group)
        self.replicas = None if replica_group is None else ReplicaSums(replica_group)
        self.is_last_microbatch = True
        add_rows_in_place()
        self.quantized_weights: list[tuple[Any, Any]] = []
        self.sums: list[GradientSums] = []
        for module in fsdp_modules(self.module):
            # FSDP2 would divide by the number of ranks. The divisor is the number of tokens, which is known after the
            # last microbatch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
            # A module whose parameters all belong to modules inside of it has none of its own.
            if fsdp_parameters(module):
                self.sums.append(GradientSums(module, grad_dtype, self._send_if_complete))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of all microbatches of a step but the last one: replicas do not send their sums yet."""
        self.is_last_microbatch = False
        try:
            yield
        finally:
            self.is_last_microbatch = True

    def _send_if_complete(self, sums: GradientSums) -> None:
        if self.replicas is not None and self.is_last_microbatch:
            # FSDP2's hook runs in the backward pass, module by module: sums travel while earlier layers are still
            # computed.
            self.replicas.start(sums)

    def finish_grad_sync(self, *unused: Any, **options: Any) -> None:
        """Complete the gradients of a step, which are reduced in the backward pass of each microbatch."""
        for sums in self.sums:
            # A module without gradients in this step has old sums: zeros before the replicas add them.
            sums.finish()
        if self.replicas is not None:
            self.replicas.finish(self.sums)

    def zero_grad_buffer(self) -> None:
        """Forget the gradients, before a step."""
        for sums in self.sums:
            sums.start()

    def scale_gradients(self, scaling_factor: Any) -> None:
        """Multiply the gradients."""
        for sums in self.sums:
            sums.multiply(scaling_factor)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:
        return self.module.load_state_dict(state_dict, strict)


def agree_on_overflow(parts: Iterable[MixedPrecisionOptimizer]) -> None:
    """Let all ranks skip an update together when gradients overflow at a loss scale.

    megatron-core 0.16.1's optimizer looks for an overflow in the gradients of this rank, and agrees with the ranks that
    have other parts of the layers. Here each of them has other rows, so all ranks agree. The gradients that it hands
    to the check, and the weights that it copies, are this rank's rows: the operations of a loss scale do not take the
    tensors of FSDP2.

    Args:
        parts: the chained optimizers; those without a loss scale stay as they are.
    """
    for part in parts:
        if getattr(part, "grad_scaler", None):
            part._unscale_main_grads_and_check_for_nan = partial(unscale_rows, part)
            part._dummy_overflow_buf = None  # then `copy_` copies, which takes them


def unscale_rows(optimizer: MixedPrecisionOptimizer) -> bool:
    """Divide the main gradients by the loss scale; whether a value of any rank is not finite. Collective."""
    rows = [gradient.to_local() for gradient in optimizer._collect_main_grad_data_for_unscaling()]
    optimizer.found_inf.zero_()
    # One launch: it divides, and sets the flag if a value is not finite.
    torch._amp_foreach_non_finite_check_and_unscale_(rows, optimizer.found_inf, optimizer.grad_scaler.inv_scale)
    # Before any rank decides: a rank that skipped alone would have other weights.
    dist.all_reduce(optimizer.found_inf, op=dist.ReduceOp.MAX)
    return optimizer.found_inf.item() > 0


def replica_groups(num_replicas: int) -> tuple[dist.ProcessGroup, Optional[dist.ProcessGroup]]:
    """The ranks of this rank's replica, which are consecutive, and those with the same rows; None with one replica."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if num_replicas == 1:
        return group, None
    ranks, size = dist.get_process_group_ranks(group), group.size() // num_replicas
    first = group.rank() // size * size
    # Ranks r, size + r, ... have the same rows: position r of each replica.
    own, same = ranks[first : first + size], ranks[group.rank() % size :: size]
    # All ranks of a group come here. `use_local_synchronization` asks no other rank to take part.
    shard, replica = (dist.new_group(each, use_local_synchronization=True) for each in (own, same))
    return shard, replica


def add_rows_in_place() -> None:
    """Let megatron-core add the gradients of norms and tied embeddings over tensor-parallel ranks row by row.

    It gathers the complete gradients, and replaces `main_grad` by a new tensor.
    """
    gradients: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    # Each tensor-parallel rank has the same rows of a copy, which can be added without gathering them.
    gradients._unshard_if_dtensor = to_local_if_dtensor
    # They were added in place: `main_grad` stays a view of `GradientSums.rows`.
    gradients._reshard_if_dtensor = lambda added, gradient: gradient


def wrapper_arguments(device_type: str, precision: MixedPrecisionPolicy) -> AbstractContextManager[Any]:
    """Context in which megatron-core's wrapper uses these arguments, which it does not have."""
    mesh = SimpleNamespace(from_group=lambda group, _: DeviceMesh.from_group(group, device_type))
    return patch.multiple(wrapper, DeviceMesh=mesh, fully_shard=partial(fully_shard, mp_policy=precision))
