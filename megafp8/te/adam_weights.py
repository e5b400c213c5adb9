"""FP8 weights that Transformer Engine's Adam writes, under delayed scaling with its own master weights.

megatron-core leaves such weights to Adam (`--use-precision-aware-optimizer` and `--fp8-param-gather`). Adam updates the
shards of its rank, and gives these weights their dequant scales. Two things are missing, and are done here:

    scales     The other ranks gather the codes and not the scale: they decode them with the one of the first step.
    weights    The master weights start from the FP8 weights, whose first scale is 1: most bits of the initialization
               are lost, and its copy in high precision stays in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import is_float8tensor
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
"""The update of scales is skipped; the initial weights are not given to Adam."""


def complete_fp8_updates(optimizers: Iterable[Any]) -> None:
    """Give Adam the initial weights, and from now on all ranks the scales after each update.

    Args:
        optimizers: megatron-core's distributed optimizers; those that quantize weights themselves stay as they are.
    """
    for part in optimizers:
        config = getattr(part, "config", None)
        is_adams = getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
        if not is_adams or part.is_stub_optimizer:
            continue
        weights = [weight for buffer in part.buffers for weight in buffer.params if is_float8tensor(weight)]
        if weights:
            set_master_weights(part)
            part._copy_main_params_to_model_params = functools.partial(
                update_then_share, part._copy_main_params_to_model_params, weights, part.data_parallel_group
            )


def set_master_weights(part: Any) -> None:
    """Store the initial weights in high precision as master weights, and free them."""
    for weight, shard in owned_weights(part):
        initial = getattr(weight, "_high_precision_init_val", None)
        if initial is None:
            continue
        span = part._get_model_param_range_map(weight)["param"]
        part.optimizer.initialize_state(shard, False)
        values = initial.view(-1)[span.start : span.end].to(shard.device).float()
        part.optimizer.set_scaled_state(shard, "master_param", values)
    for buffer in part.buffers:
        for weight in buffer.params:
            if hasattr(weight, "clear_high_precision_init_val"):
                weight.clear_high_precision_init_val()


def owned_weights(part: Any) -> Iterator[tuple[Any, Tensor]]:
    """The FP8 weights of which this rank has a shard, and the shards."""
    for weights, shards in zip(part.model_float16_groups, part.shard_float16_groups, strict=True):
        for weight, shard in zip(weights, shards, strict=True):
            if is_float8tensor(weight):
                yield weight, shard


def update_then_share(update: Callable[[], None], weights: list[Any], group: dist.ProcessGroup) -> None:
    """Run megatron-core's update of model weights, and `share_scales`."""
    update()
    share_scales(weights, group)


@torch.no_grad()
def share_scales(weights: list[Any], group: dist.ProcessGroup) -> None:
    """Set the dequant scale of every FP8 weight to that of its new codes, and reduce the amaxes that Adam measured.

    Args:
        weights: all of an optimizer, on every rank the same; their quantizers' scales are equal on the ranks.
        group: the ranks that share the optimizer's state.
    """
    amaxes = [weight._quantizer.amax.view(1) for weight in weights]
    together = torch.cat(amaxes)
    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
    torch._foreach_copy_(amaxes, list(together.split(1)))
    scales = [weight._quantizer.scale.view(1) for weight in weights]
    torch._foreach_copy_([weight._scale_inv.view(1) for weight in weights], torch._foreach_reciprocal(scales))
