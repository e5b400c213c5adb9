"""Settings: how the work is split over ranks. world = tensor x pipeline x context x data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from megafp8.config.schema.setting import setting


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the work is split over ranks. world = tensor x pipeline x context x data."""

    tensor_model_parallel_size: int = setting(1, "ranks that share each layer's matrices")
    pipeline_model_parallel_size: int = setting(1, "ranks that share the stack of layers")
    num_layers_per_virtual_pipeline_stage: Optional[int] = setting(
        None, "layers in one chunk of the interleaved pipeline schedule"
    )
    num_virtual_stages_per_pipeline_rank: Optional[int] = setting(
        None, "chunks per pipeline rank of the interleaved schedule"
    )
    context_parallel_size: int = setting(1, "ranks that share each sequence")
    cp_comm_type: str = setting(
        "p2p", "how context-parallel attention communicates (TE)", choices=("p2p", "a2a", "allgather")
    )
    sequence_parallel: bool = setting(
        False, "split norms and dropout over the tensor-parallel ranks along the sequence"
    )
    use_distributed_optimizer: bool = setting(False, "shard optimizer state over the data-parallel ranks")
    overlap_grad_reduce: bool = setting(False, "reduce gradients while the backward pass runs")
    overlap_param_gather: bool = setting(False, "gather parameters while the forward pass runs")
    overlap_p2p_comm: bool = setting(
        True, "overlap pipeline sends with computation (interleaved schedule)", off=("--no-overlap-p2p-communication",)
    )
    tp_comm_overlap: bool = setting(
        False, "send activations between tensor-parallel ranks while GEMMs run (Transformer Engine's user buffers)"
    )
    tp_comm_overlap_cfg: Optional[str] = setting(
        None, "YAML file with how each GEMM's communication is overlapped (`ub_cfgs` of Transformer Engine)",
        metavar="FILE",
        path=True,
    )
    tp_comm_overlap_ag: bool = setting(True, "overlap all-gathers", off=("--disable-tp-comm-overlap-ag",))
    tp_comm_overlap_rs: bool = setting(True, "overlap reduce-scatters", off=("--disable-tp-comm-overlap-rs",))
    tp_comm_overlap_rs_dgrad: bool = setting(False, "overlap reduce-scatters with dgrad, not with wgrad")
    tp_comm_bulk_dgrad: bool = setting(
        True, "overlap all-gathers of inputs with dgrad as a whole", off=("--disable-tp-comm-bulk-dgrad",)
    )
    tp_comm_bulk_wgrad: bool = setting(
        True, "overlap reduce-scatters with wgrad as a whole", off=("--disable-tp-comm-bulk-wgrad",)
    )
    tp_comm_bootstrap_backend: str = setting(
        "nccl", "collectives that set up the user buffers", choices=("nccl", "gloo", "mpi")
    )
    ddp_bucket_size: Optional[int] = setting(None, "parameters in one gradient bucket; default megatron-core's")
    ddp_average_in_collective: bool = setting(False, "average gradients inside the collective")
    distributed_backend: Optional[str] = setting(
        None, "collective backend; default nccl on CUDA and gloo on CPU", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = setting(10, "minutes after which a collective gives up")
    rendezvous_timeout_s: float = setting(
        300.0, "seconds that the ranks have to reach each other at the start; those that did not come are named"
    )
