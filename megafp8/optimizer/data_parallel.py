"""What data-parallel ranks do with the model of a run, as megatron-core's DDP does it.

The settings tell how ranks share a model (`ParallelConfig.shards_weights`). A chunk whose weights are sharded carries
its own runtime, which `runtime_of` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Optional

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from megafp8.config.schema import ParallelConfig
from megafp8.mcore.grad_reduction import reduction_group
from megafp8.mcore.layer_runtime import CodesByLinear
from megafp8.mcore.nccl_buffers import provide_allocator
from megafp8.mcore.process_groups import bucket_groups
from megafp8.optimizer.fp8_gradients import Fp8Reduction, GradientCodes
from megafp8.optimizer.gradient_communication import GradientTraffic, ParameterTraffic, add_grad_sync_hook, poison
from megafp8.optimizer.received_bytes import ReceivedBytes

Excludes = Callable[[Any], bool]
"""Whether a parameter is not quantized."""
CodesOfChunk = Callable[[Any], CodesByLinear]


class DataParallelRuntime:
    """megatron-core's DDP: a rank has all weights, and buckets of gradients, which are reduced once in a step."""

    def wrap(
        self, core: Any, ddp: Any, parallel: ParallelConfig, chunks: Sequence[Any], codes_of: CodesOfChunk
    ) -> list[Any]:
        """Wrap each chunk of a model with its gradients and their reduction.

        Args:
            ddp: `mcore.config.build_ddp_config`.
            codes_of: what ranks gather of a chunk with sharded weights, if `ddp.fp8_param_gather` says so.
        """
        wrapped = partial(DistributedDataParallel, core, ddp)
        provide_allocator(parallel)
        # Later chunks of a rank finish their backward pass earlier, so their buffers need no buckets to overlap.
        return [wrapped(chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)]

    def finish_optimizers(self, parts: Iterable[Any]) -> None:
        """Adapt megatron-core's optimizers of wrapped chunks."""

    def send_codes(self, chunk: Any, excludes: Excludes, codes: GradientCodes, step: Fp8Reduction, nodes: Any) -> None:
        """Reduce the gradients of a chunk that are in no buckets as codes. `nodes`: `NodeGroups`, if given."""

    def inject_faults(self, chunks: Sequence[Any]) -> None:
        """Let fault injection change this rank's gradients before they are reduced."""
        for group in (group for chunk in chunks for group in bucket_groups(chunk)):
            add_grad_sync_hook(group, partial(poison, group))

    def gather_traffic(self, chunks: list[Any]) -> Optional[ReceivedBytes]:
        """Build the counter of gathered weights; None where every rank has all weights."""
        return ParameterTraffic(chunks) if chunks[0].ddp_config.use_distributed_optimizer else None

    def reduction_traffic(self, chunks: list[Any]) -> Optional[ReceivedBytes]:
        """Build the counter of gradients that are not reduced as codes; None where nothing is reduced."""
        has_ranks = any(reduction_group(group) for chunk in chunks for group in bucket_groups(chunk))
        return GradientTraffic(chunks) if has_ranks else None

    def drop_gathered(self, chunk: Any) -> None:
        """Forget gathered weights, after this rank has written its own."""

    def sharding_group(self, chunk: Any) -> Any:
        """The ranks that share weights, as megatron-core's modules expect it in the metadata of a checkpoint."""
        return parallel_state.get_data_parallel_group(with_context_parallel=True)

    def place_rows(self, chunk: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Return a chunk's sharded state with this rank's rows in their places."""
        return state

    def model_rows(self, chunk: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Return a loaded model state as the chunk has its weights."""
        return state

    def set_optimizer_rows(self, part: Any, state: dict[str, Any]) -> None:
        """Change a loaded state of one of megatron-core's optimizers to what the optimizer has."""


DDP = DataParallelRuntime()


def runtime_of(chunk: Any) -> DataParallelRuntime:
    """The runtime of a chunk, wrapped or not."""
    return getattr(chunk, "data_parallel", DDP)
