"""Settings with which a run needs less memory, and how much less by the memory model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from megafp8.config import mixture, rules
from megafp8.config.fused_adam import fused_adam_problem
from megafp8.config.layer_backends import LayerBackend
from megafp8.config.micro_batch_sizes import possible_sizes
from megafp8.config.run_sizes import run_sizes
from megafp8.config.schema import ModelConfig, OptimizerConfig, RunConfig
from megafp8.config.settings import settings_by_name, value_of, with_values
from megafp8.resources.automatic import BF16_MOMENTS, MAX_BETA2_IN_BF16, Values
from megafp8.resources.memory import estimate_memory

MICRO, TENSOR = "training.micro_batch_size", "parallel.tensor_model_parallel_size"
SEQUENCE = "parallel.sequence_parallel"
GRANULARITY, METHOD = "training.recompute_granularity", "training.recompute_method"
SHORT_FOR_SELECTIVE = ("training.recompute_activations", "training.moe_layer_recompute")
NUM_LAYERS, MODULES = "training.recompute_num_layers", "training.recompute_modules"


class Saving(NamedTuple):
    """Flags, and the memory in bytes that a rank needs less with them."""

    flags: str
    num_bytes: int


def recomputations(model: ModelConfig) -> tuple[dict[str, Any], ...]:
    """Settings of recomputation to try: none, the MLPs or experts, and complete layers."""
    module = "moe" if mixture.is_mixture(model) else "mlp"
    return (
        {},
        {GRANULARITY: "selective", MODULES: (module,)},
        {GRANULARITY: "full", METHOD: "uniform", NUM_LAYERS: 1},
    )


def low_moments(optimizer: OptimizerConfig) -> Values:
    """Both moments of Adam in 16 bits."""
    second = "bf16" if optimizer.adam_beta2 <= MAX_BETA2_IN_BF16 else "fp16"  # FP16 has a scale, and more bits
    return {**BF16_MOMENTS, "optimizer.exp_avg_sq_dtype": second}


def savings(
    config: RunConfig, world_size: int, padded_vocab: int, stage: int, implementation: LayerBackend
) -> list[Saving]:
    """Changes of one kind each, that which saves most on a rank of the stage first; only ones that break no rule.

    Args:
        config: with a value for each automatic setting.
    """

    def needed_bytes(changed: RunConfig) -> int:
        sizes = run_sizes(changed, world_size, padded_vocab)
        return estimate_memory(sizes, stage=stage, implementation=implementation).total_bytes

    named, now, found = settings_by_name(), needed_bytes(config), []
    for values in _changes(config, world_size):
        changed = with_values(config, values)
        if not rules.setting_problems(changed, world_size) and (num_bytes := now - needed_bytes(changed)) > 0:
            flags = " ".join(named[name].as_flag(value) for name, value in values.items() if value is not False)
            replaced = " and ".join(named[name].flags[0] for name, value in values.items() if value is False)
            found.append(Saving(f"{flags} in place of {replaced}" if replaced else flags, num_bytes))
    return sorted(found, key=lambda saving: -saving.num_bytes)


def _changes(config: RunConfig, world_size: int) -> Iterator[Values]:
    size, tensor = config.training.micro_batch_size, config.parallel.tensor_model_parallel_size
    smaller = [each for each in possible_sizes(config, world_size) if each < (size or 0)]
    yield from ({MICRO: each} for each in smaller[-1:])
    if config.training.recompute_granularity != "full":
        _, selective, full = recomputations(config.model)
        # Short flags for selective recomputation contradict the full one.
        short = dict.fromkeys((name for name in SHORT_FOR_SELECTIVE if value_of(config, name)), False)
        yield from (selective, {**full, **short})
    if not config.optimizer.use_precision_aware_optimizer and not fused_adam_problem(with_values(config, BF16_MOMENTS)):
        yield low_moments(config.optimizer)
    if not config.parallel.shards_optimizer:
        yield {"parallel.use_distributed_optimizer": True}
    yield {TENSOR: 2 * tensor, SEQUENCE: True}
