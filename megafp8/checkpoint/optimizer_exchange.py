"""Adam's state of a run with the distributed optimizer for one without it, and the other way round.

Both save moments and master weights by the name of the weight. They differ in three things:

                                     distributed optimizer       without it
    master weights                   `param`                     `fp32_param`; in FP32 the weights themselves
    number of the step               in the parameter groups     beside the moments, if Adam counts for each parameter
    place of the parameter groups    in `optimizer`              the same; in FP32 the state itself
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megafp8.config import derived
from megafp8.config.schema import PrecisionConfig

SHARDED, COMPLETE = "optimizer.state.param.", "optimizer.state.fp32_param."


def request_saved_masters(optimizer: dict[Any, Any], saved: PrecisionConfig, was_distributed: bool) -> None:
    """Let this run's master weights be loaded from those of an exchanged checkpoint, in place.

    Args:
        optimizer: sharded state of this run's optimizer, to be loaded.
        saved: settings of the checkpoint's run. In FP32 `load_converted` copies the weights.
        was_distributed: it had the distributed optimizer.
    """
    if derived.params_dtype(saved) == "fp32":
        # The checkpoint has no masters: its weights are FP32 and are read as the weights.
        for values in sharded_weights(optimizer):
            del values["param"]
        return
    own, theirs = (COMPLETE, SHARDED) if was_distributed else (SHARDED, COMPLETE)
    for leaf in nested_values(optimizer):
        if isinstance(leaf, (ShardedTensor, ShardedTensorFactory)) and leaf.key.startswith(own):
            # Only the keys differ: shapes and offsets are those of the weight, in both forms.
            leaf.key = theirs + leaf.key.removeprefix(own)


def sharded_weights(optimizer: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yield the state of each parameter of distributed optimizers: one, or several by number."""
    for part in [optimizer] if "param_state" in optimizer else optimizer.values():
        if isinstance(part, dict):
            yield from part.get("param_state", {}).values()


def recorded_step(saved: dict[str, Any]) -> int:
    """Return the number of steps in the state of one optimizer, as a checkpoint has it; 0 before the first one."""
    inner = saved.get("optimizer", saved)
    # Groups may have different counts, such as a group without parameters on a rank.
    steps = [group["step"] for group in inner["param_groups"] if group.get("step") is not None]
    return int(max(steps, default=inner.get("state", {}).get("common_step", 0)))


def convert(part: Any, state: dict[str, Any], step: int) -> None:
    """Give what was loaded the form of this run's optimizer, in place.

    Args:
        part: one optimizer of megatron-core, with weights already loaded.
        state: its parameter groups as saved, and what was loaded into its tensors.
        step: from `recorded_step`.
    """
    inner = state.pop("optimizer", state)
    groups, moments = inner.pop("param_groups"), inner.pop("state", None) or state.pop("state", {})
    moments.pop("common_step", None)
    groups = [{name: value for name, value in group.items() if name != "step"} for group in groups]
    if isinstance(part.optimizer, torch.optim.Adam) and not isinstance(part, DistributedOptimizer):
        moments["common_step"] = torch.tensor(float(step))
    else:
        # All other optimizers count in the parameter groups.
        groups = [group | {"step": step} for group in groups]
    if isinstance(part, DistributedOptimizer):
        state["optimizer"] = {"param_groups": groups}
    elif hasattr(part, "fp32_from_float16_groups"):
        state["optimizer"] = {"param_groups": groups, "state": moments}
    else:
        state |= {"param_groups": groups, "state": moments}
