"""FP8 weights whose master weights are in Transformer Engine's Adam, under delayed scaling.

megatron-core leaves such weights to Adam (`--use-precision-aware-optimizer` and `--fp8-param-gather`), which casts the
shards of its rank itself. Three things are missing, and are done here:

    scales     The other ranks gather the codes and not their dequant scale, which stays that of the first step.
    weights    The master weights start from the FP8 weights, whose first scale is 1: most bits of the initialization
               are lost, and its copy in high precision stays in memory.
    casts      megatron-core's own cast, which megafp8 calls after scales have changed without an update, does nothing.

All weights are therefore cast after each update from what Adam stores, as megatron-core does where it has the master
weights: codes, scales and amaxes of all ranks. A run with FP32 master weights is then the one without Adam's, and a
resumed run casts the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Optional

from megatron.core.fp8_utils import is_float8tensor, quantize_param_shard
from torch import Tensor

EVIDENCE = (
    (
        "optimizer/distrib_optimizer.py",
        "        if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:\n            return\n",
    ),
    (
        "optimizer/distrib_optimizer.py",
        "                        # When using precision-aware optimizer, main params are held by FusedAdam.\n"
        "                        shard_main_param = None\n",
    ),
)
"""The cast is skipped; the initial weights are not given to Adam."""


def cast_weights_of_adam(optimizers: Iterable[Any]) -> None:
    """Give Adam the initial weights, and cast FP8 weights from its master weights.

    Args:
        optimizers: megatron-core's distributed optimizers; those that have the master weights themselves stay as they
            are.
    """
    for part in optimizers:
        config = getattr(part, "config", None)
        if not getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False) or part.is_stub_optimizer:
            continue
        weights = [weight for buffer in part.buffers for weight in buffer.params if is_float8tensor(weight)]
        if weights:
            shards = owned_shards(part)
            set_master_weights(part, weights, shards)
            part._copy_main_params_to_model_params = functools.partial(cast_weights, part, weights, shards)


def owned_shards(part: Any) -> dict[Any, Tensor]:
    """The shards of this rank by their FP8 weights."""
    return {
        weight: shard
        for weights, shards in zip(part.model_float16_groups, part.shard_float16_groups, strict=True)
        for weight, shard in zip(weights, shards, strict=True)
        if is_float8tensor(weight)
    }


def set_master_weights(part: Any, weights: list[Any], shards: dict[Any, Tensor]) -> None:
    """Store the initial weights in high precision as master weights, and free them."""
    for weight in weights:
        initial, shard = getattr(weight, "_high_precision_init_val", None), shards.get(weight)
        if initial is None:
            continue
        if shard is not None:
            span = part._get_model_param_range_map(weight)["param"]
            part.optimizer.initialize_state(shard, False)
            values = initial.view(-1)[span.start : span.end].to(shard.device).float()
            part.optimizer.set_scaled_state(shard, "master_param", values)
        weight.clear_high_precision_init_val()


def cast_weights(part: Any, weights: list[Any], shards: dict[Any, Tensor]) -> None:
    """Cast the FP8 weights of an optimizer; all data-parallel ranks call it.

    It takes up to 4 bytes for each element of a shard, as the update does.
    """
    masters: list[Optional[Tensor]] = []
    starts: list[Optional[int]] = []
    for weight in weights:
        shard = shards.get(weight)
        masters.append(None if shard is None else part.optimizer.get_unscaled_state(shard, "master_param"))
        starts.append(None if shard is None else part._get_model_param_range_map(weight)["param"].start)
    quantize_param_shard(weights, masters, starts, part.data_parallel_group)
