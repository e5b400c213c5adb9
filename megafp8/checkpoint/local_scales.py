"""Scales and amax histories of data-parallel ranks in a checkpoint (`--tp-only-amax-red`).

With the flag every data-parallel rank has its own. Those of the first rank have the keys that they have without the
flag, so that every run can load them. Those of another rank have its number after the key. They fit a run with as many
data-parallel ranks, whatever its tensor- and pipeline-parallel layout. Other runs start with those of the first rank on
all ranks, and say so.
"""

from __future__ import annotations

from typing import Any, Optional

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values

from megafp8.checkpoint.compatibility import is_extra_state
from megafp8.config import derived
from megafp8.config.schema import RunConfig

KEY, FLAG = "local_scales", "--tp-only-amax-red"


def group_sizes(config: RunConfig) -> Optional[list[int]]:
    """Numbers of ranks with scales of their own: data x context parallel, and those of an expert; None without them."""
    precision = config.precision
    is_local = precision.tp_only_amax_red and derived.is_stateful(precision)
    if not is_local or parallel_state.get_data_parallel_world_size() == 1:
        return None
    return [
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_world_size(),
    ]


def name_by_rank(model: dict[str, Any]) -> None:
    """Put the number of this rank after the keys of its scales, in a sharded model state. That of the first is 0."""
    for leaf in nested_values(model):
        if is_extra_state(leaf.key) and leaf.data is not None and leaf.replica_id[-1]:
            *others, rank = leaf.replica_id
            leaf.key, leaf.replica_id = f"{leaf.key}.{rank}", (*others, 0)


def request(model: dict[str, Any], saved: Optional[list[int]], own: Optional[list[int]]) -> str:
    """Request the scales of this rank in a sharded model state that is to be loaded, if the checkpoint has them.

    Args:
        saved, own: `group_sizes` of the checkpoint and of this run.

    Returns:
        If the ranks get those of the first rank, a note for the user; else an empty string.
    """
    if saved == own:
        if own is not None:
            name_by_rank(model)
        return ""
    reason = (
        "the checkpoint has no others" if saved is None else f"the others fit {describe(saved)}, not {describe(own)}"
    )
    return f"all ranks start with the scales and amax histories of the first rank ({FLAG}): {reason}"


def describe(sizes: Optional[list[int]]) -> str:
    """Return `group_sizes` as text."""
    if sizes is None:
        return "a run in which all ranks have the same"
    return f"{sizes[0]} data x context parallel ranks ({sizes[1]} with the same experts)"
