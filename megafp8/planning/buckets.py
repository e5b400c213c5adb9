"""Parameters in a gradient bucket: megatron-core's number, and a larger one for the ranks of one node."""

from __future__ import annotations

import os
from typing import Optional

from megafp8.config import dimensions, rules
from megafp8.config.rules.pipeline import is_interleaved
from megafp8.config.schema import RunConfig
from megafp8.device.gpus import Gpu
from megafp8.planning.memory import parameters_on_stage

MIN_SIZE, SIZE_PER_RANK = 40_000_000, 1_000_000
"""megatron-core takes the larger of the first and the second times the number of ranks."""
MAX_SIZE_IN_NODE, MIN_BUCKETS = 200_000_000, 10
"""On two H200s of one node buckets of 200M were 0 to 1% of a step faster than megatron-core's (RESULTS.md). A tenth of
the model at most, since nothing hides the reduction of the last bucket."""


def default_size(num_ranks: int) -> int:
    """megatron-core's, for a number of ranks with the same weights."""
    return max(MIN_SIZE, SIZE_PER_RANK * num_ranks)


def size_in_node(config: RunConfig, gpu: Optional[Gpu], world_size: int, num_ranks: int) -> Optional[int]:
    """A size above the default, for `num_ranks` ranks with the same weights; None where the default is better.

    Without `--vocab-size` the embedding does not count. The default is kept with FSDP2, which has no such buckets, with
    codes of gradients, which can have one scale for each, and where several buffers share the weights: those of virtual
    stages, and of experts on several ranks.
    """
    parallel = config.parallel
    has_one_buffer = parallel.expert_model_parallel_size == 1 and not is_interleaved(config)
    reduces = parallel.overlap_grad_reduce and num_ranks > 1 and not parallel.use_torch_fsdp2
    if not (reduces and has_one_buffer) or config.precision.grad_reduce_in_fp8:
        return None
    if gpu is None or world_size > gpu.gpus_per_node:
        return None
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # a dry run has no such variable
    if local_ranks < world_size or rules.setting_problems(config, world_size):
        return None
    padded_vocab = dimensions.padded_vocab_size(config, config.model.vocab_size or 1)
    size = min(MAX_SIZE_IN_NODE, sum(parameters_on_stage(config, padded_vocab, 0)) // MIN_BUCKETS)
    return size if size > default_size(num_ranks) else None
