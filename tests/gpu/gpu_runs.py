"""Small runs on one GPU, one after the other in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from small_run import build_run
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megafp8.config import flags, rules
from megafp8.device import capability, mcore_cpu, platform

mcore_cpu.install()
platform.compute_deterministically()  # equal runs give equal bits

from megafp8.parallel.groups import leave_groups  # noqa: E402
from megafp8.training.assemble import Run  # noqa: E402

# Wide enough for fused attention and for every recipe's blocks.
SIZES = (
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 128 --vocab-size 255 "
    "--make-vocab-size-divisible-by 128 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--tokenizer-type NullTokenizer --mock-data --num-workers 0 --micro-batch-size 4 --global-batch-size 8 "
    "--train-iters 100 --lr 1e-3 --lr-decay-style constant --adam-beta2 0.95 --weight-decay 0.1 --num-threads 1 "
    "--eval-iters 2 --clip-grad 0.5 --use-distributed-optimizer"
)
RECIPES = {
    "bf16": "",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}
FP8_RECIPES = tuple(name for name in RECIPES if name != "bf16")


@contextmanager
def gpu_run(extra: str, precision: str = "--bf16") -> Iterator[Run]:
    """A run on Python source; its groups, and what Transformer Engine keeps for the process, end with it."""
    config = flags.parse(f"{SIZES} {precision} {extra}".split()).config
    found = [*rules.problems(config, 1), *capability.problems(config, capability.detect_target())]
    assert not found, found
    platform.join_ranks(platform.detect_platform(), 5)  # once: starting NCCL takes longer than a run
    environment = dict(os.environ)
    try:
        yield build_run(config)
    finally:
        # megatron-core sets what Transformer Engine's attention may use, and refuses another choice later.
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        leave_groups()
        FP8GlobalStateManager.reset()
        torch.cuda.empty_cache()
