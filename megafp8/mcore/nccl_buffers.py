"""Weight and gradient buffers in memory that NCCL allocates and registers (`--use-nccl-ub`).

megatron-core compiles an allocator at the first start, for which CUDA's compiler and NCCL's headers must be installed,
and it turns NVLink multicast on whatever the environment says. The allocator of torch's NCCL backend is used instead,
and the environment stays. `device/nccl_buffers.py` has what the flag needs.

`BUFFERS_EVIDENCE` quotes the code. A test fails when a quoted text is gone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megafp8.config.schema import ParallelConfig
from megafp8.mcore.patches import import_core

BUFFERS_EVIDENCE = (
    ("nccl_allocator.py", "nccl_allocator = torch.utils.cpp_extension.load_inline("),
    ("nccl_allocator.py", 'os.environ["NCCL_NVLS_ENABLE"] = "1"'),
    ("distributed/param_and_grad_buffer.py", "nccl_allocator.init()"),
)


def ddp_fields(parallel: ParallelConfig) -> dict[str, bool]:
    """The field of megatron-core's configuration of gradient buffers."""
    return {"nccl_ub": bool(parallel.use_nccl_ub)}


def provide_allocator(parallel: ParallelConfig) -> None:
    """Let megatron-core allocate registered buffers with torch's NCCL backend. torch.distributed must be
    initialized."""
    if not parallel.use_nccl_ub:
        return
    device = torch.device("cuda", torch.cuda.current_device())
    allocator = import_core("nccl_allocator")
    allocator._allocator = dist.group.WORLD._get_backend(device).mem_allocator
    allocator.init = lambda: None
