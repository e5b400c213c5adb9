"""megatron-core's own FSDP (Megatron-LM's `--use-megatron-fsdp`) against its distributed optimizer, on several GPUs.

    torchrun --nproc-per-node 2 benchmarks/megatron_fsdp.py --shape B

One wrapper after the other, each in a process group of its own: BF16, megatron-core's loop of `megatron_loop.py`. A
wrapper that fails is reported with its error.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

from benchmarks import megatron_loop


def sharded(config: Any, ddp: DistributedDataParallelConfig, module: Any) -> FullyShardedDataParallel:
    """Weights, gradients and optimizer state in equal parts on all ranks; weight gradients are not added in GEMMs."""
    for part in module.modules():
        if getattr(part, "fuse_wgrad_accumulation", False):
            part.fuse_wgrad_accumulation = False
    ddp.use_megatron_fsdp, ddp.data_parallel_sharding_strategy = True, "optim_grads_params"
    return FullyShardedDataParallel(config, ddp, module)


WRAPPERS = {"distributed optimizer": DistributedDataParallel, "Megatron-FSDP": sharded}


def measure(wrapper: Any, shape: str, warm_up: int, steps: int) -> tuple[float, float, float]:
    """Median milliseconds of a step, peak GiB, and the last loss."""
    megatron_loop.DistributedDataParallel = wrapper
    loop = megatron_loop.PeerLoop(shape, "bf16", fused_operations=False)
    times: list[float] = []
    loss = 0.0
    for number in range(warm_up + steps):
        start = time.perf_counter()
        loss = loop.step(number)  # waits for the loss
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[warm_up:]), torch.cuda.max_memory_allocated() / 2**30, loss


def main() -> None:
    """Print a line for each wrapper."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(megatron_loop.SHAPES), default="B", help="model and batch of a rank")
    parser.add_argument("--warm-up", type=int, default=4, metavar="N", help="steps before the timed ones (default 4)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="timed steps (default 8)")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    report = partial(print, flush=True) if dist.get_rank() == 0 else lambda text: None
    for name, wrapper in WRAPPERS.items():
        torch.cuda.reset_peak_memory_stats()
        try:
            step_ms, peak_gib, loss = measure(wrapper, args.shape, args.warm_up, args.steps)
            report(f"{name}: {step_ms:.1f} ms, {peak_gib:.1f} GiB, loss {loss:.4f}")
        except Exception:
            report(f"{name}: {traceback.format_exc()[-1500:]}")
        parallel_state.destroy_model_parallel()
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
