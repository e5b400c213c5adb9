"""Whether a run fits into the memory of its GPUs, by the estimate of `memory.py`, and what makes it fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from megafp8.config import rules
from megafp8.config.schema import RunConfig
from megafp8.config.settings import settings_by_name, with_values
from megafp8.planning import micro_batch
from megafp8.planning.automatic import BF16_MOMENTS, MAX_BETA2_IN_BF16, Values
from megafp8.planning.layouts import MICRO, recomputations
from megafp8.planning.memory import estimate_stages
from megafp8.planning.micro_batch import gib
from megafp8.planning.planned_run import PlannedRun
from megafp8.planning.process_memory import FREE_MEMORY_FRACTION, non_torch_bytes


def memory_warnings(run: PlannedRun) -> list[str]:
    """Lines of a warning with the shortage and the first remedy that suffices; empty if the run fits."""
    limit_bytes = int(run.gpu.memory_bytes * (1 - FREE_MEMORY_FRACTION))
    missing_bytes = needed_bytes(run, run.config) - limit_bytes
    if missing_bytes <= 0:
        return []
    lines = [
        f"the estimate does not fit into {run.gpu.name}: {gib(missing_bytes)} GiB more than {gib(limit_bytes)}, which "
        f"leaves {FREE_MEMORY_FRACTION:.0%} for fragments; {gib(non_torch_bytes(run.config, run.world_size))} GiB are "
        "outside of torch"
    ]
    for values in remedies(run):
        changed = with_values(run.config, values)
        if not rules.setting_problems(changed, run.world_size) and needed_bytes(run, changed) <= limit_bytes:
            named = settings_by_name()
            flags = " ".join(named[name].as_flag(value) for name, value in values.items())
            return [*lines, f"it fits with {flags}"]
    return [
        *lines,
        "no smaller micro batch, recomputation or moments in 16 bits suffice: megafp8 plan finds other layouts",
    ]


def needed_bytes(run: PlannedRun, config: RunConfig) -> int:
    """Memory of the stage that needs the most, with what torch does not allocate; a CUDA graph's is not counted."""
    estimates = estimate_stages(config, run.world_size, run.padded_vocab)
    return max(each.total_bytes for each in estimates) + non_torch_bytes(config, run.world_size)


def remedies(run: PlannedRun) -> Iterator[Values]:
    """Settings to try: smaller micro batches, then these with recomputation, then all of it with moments in 16 bits."""
    config = run.config
    size, is_recomputed = config.training.micro_batch_size, config.training.recompute_granularity is not None
    assert isinstance(size, int)
    smaller = [each for each in micro_batch.possible_sizes(config, run.world_size) if each < size]
    sizes: list[Values] = [{}, *({MICRO: each} for each in reversed(smaller))]
    recomputed: Sequence[Values] = [{}] if is_recomputed else recomputations(config)
    second = "bf16" if config.optimizer.adam_beta2 <= MAX_BETA2_IN_BF16 else "fp16"  # FP16 has a scale, and more bits
    low: Values = {**BF16_MOMENTS, "optimizer.exp_avg_sq_dtype": second}
    moments: list[Values] = [{}] if config.optimizer.use_precision_aware_optimizer else [{}, low]
    for with_moments, with_recomputation, with_size in itertools.product(moments, recomputed, sizes):
        yield {**with_size, **with_recomputation, **with_moments}
