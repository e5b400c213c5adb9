"""Size of a checkpoint, and of what a rank has in memory while it writes one."""

from __future__ import annotations

from megafp8.config import derived, model_shapes
from megafp8.config.optimizers import MOMENTS
from megafp8.config.schema import RunConfig

FILES_PER_RANK = 2
# Limit of bytes written to a file but not hashed yet. It bounds the CPU copies of GPU tensors kept in memory.
MAX_LAG_BYTES = 1 << 30


def min_checkpoint_bytes(config: RunConfig, padded_vocab: int) -> int:
    """A lower bound of the bytes of a checkpoint: weights and their moving average, and unless --no-save-optim, master
    weights and moments.

    The errors of FP8 gradients, which depend on the number of ranks, are not in it.
    """
    settings = config.optimizer
    is_fp32 = derived.params_dtype(config.precision) == "fp32"
    bytes_per_parameter = 4 if is_fp32 else 2
    if not config.checkpoint.no_save_optim:
        bytes_per_parameter += 4 * MOMENTS.get(settings.optimizer, 0)
        bytes_per_parameter += 0 if is_fp32 else 4
    bytes_per_parameter += derived.ema_bytes(settings)
    return bytes_per_parameter * model_shapes.count_parameters(config.model, padded_vocab).total
