"""What distinguishes optimizers: updates of whole matrices, how ranks divide their state, and coefficients of Muon."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megafp8.config.schema import OptimizerConfig, ParallelConfig

Polynomial = tuple[float, float, float]
"""(a, b, c) of one step: X becomes a X + b (X X^T) X + c (X X^T)^2 X."""

COEFFICIENTS: Mapping[str, tuple[Polynomial, ...]] = MappingProxyType(
    {
        # Jordan 2024, "Muon: An optimizer for hidden layers in neural networks".
        "simple": ((3.4445, -4.7750, 2.0315),),
        # Cesista, You, Jordan 2025, "Squeezing 1-2% efficiency gains out of Muon by optimizing the Newton-Schulz
        # coefficients".
        "quintic": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        # Amsel et al. 2025, "The Polar Express".
        "polar_express": (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        # Boissin et al. 2025, "Turbo-Muon".
        "aol": (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
    }
)
"""--muon-coefficient-type -> polynomials of the steps. The names and values are Megatron-LM's."""
REPEATS_LAST = ("polar_express",)
"""Sets of which more steps repeat the last polynomial, and not the complete set."""


MOMENTS: Mapping[str, int] = MappingProxyType({"adam": 2, "muon": 1})
"""--optimizer -> moments of a weight of the layers, where a checkpoint has any."""

IS_MATRIX = "is_muon"
"""Key of a parameter group, in checkpoints too: whether its weights are updated as matrices."""


def updates_matrices(optimizer: OptimizerConfig) -> bool:
    """Whether the optimizer updates matrices of the layers as a whole (Muon), and not number by number."""
    return optimizer.optimizer == "muon"


def is_layer_wise(optimizer: OptimizerConfig, parallel: ParallelConfig) -> bool:
    """Whether each data-parallel rank updates complete weights of its own: such with --use-distributed-optimizer."""
    return updates_matrices(optimizer) and bool(parallel.use_distributed_optimizer)


def has_flat_shards(optimizer: OptimizerConfig, parallel: ParallelConfig) -> bool:
    """Whether megatron-core's distributed optimizer shards the state in flat ranges, which cut matrices anywhere."""
    return bool(parallel.use_distributed_optimizer) and not updates_matrices(optimizer)


def polynomials(optimizer: OptimizerConfig) -> tuple[Polynomial, ...]:
    """The polynomial of each Newton-Schulz step. `steps_problem` must have found nothing."""
    known, steps = COEFFICIENTS[optimizer.muon_coefficient_type], optimizer.muon_num_ns_steps
    if optimizer.muon_coefficient_type in REPEATS_LAST:
        return known + known[-1:] * (steps - len(known))
    return known * (steps // len(known))


def steps_problem(optimizer: OptimizerConfig) -> "str | None":
    """What is wrong with the number of Newton-Schulz steps; None if nothing is."""
    name, steps = optimizer.muon_coefficient_type, optimizer.muon_num_ns_steps
    length = len(COEFFICIENTS[name])
    if steps < 1:
        return f"--muon-num-ns-steps {steps} must be at least 1"
    if name in REPEATS_LAST and steps < length:
        return f"--muon-num-ns-steps {steps}: --muon-coefficient-type {name} needs at least {length} steps"
    if name not in REPEATS_LAST and steps % length:
        return f"--muon-num-ns-steps {steps}: --muon-coefficient-type {name} needs a multiple of {length} steps"
    return None
