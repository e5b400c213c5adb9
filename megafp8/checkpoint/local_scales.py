"""Scales and amax histories of data-parallel ranks in a checkpoint (`--tp-only-amax-red`).

With the flag every data-parallel rank has its own. Those of the first rank have the keys that they have without the
flag, so that every run can load them. Those of another rank have its number after the key. They fit a run with as many
data-parallel ranks, whatever its tensor- and pipeline-parallel layout; those of experts fit one with as many ranks that
have the same experts. All ranks of other runs start with those of the first rank, and the run says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values

from megafp8.checkpoint.metadata import is_extra_state
from megafp8.config import derived
from megafp8.config.schema import PrecisionConfig

KEY, FLAG = "local_scales", "--tp-only-amax-red"


def group_sizes(precision: PrecisionConfig) -> Optional[list[int]]:
    """Numbers of ranks with scales of their own: data x context parallel, and those of an expert; None without them."""
    is_local = precision.tp_only_amax_red and derived.is_stateful(precision)
    if not is_local or parallel_state.get_data_parallel_world_size() == 1:
        return None
    return [
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_world_size(),
    ]


def name_by_rank(model: dict[str, Any], fits: Sequence[bool] = (True, True)) -> None:
    """Put the number of this rank after the keys of its scales, in a sharded model state. That of the first is 0.

    Args:
        fits: choose the scales outside of experts, and those of experts.
    """
    # Not from the replicas' numbers, which count otherwise with several replicas of sharded weights.
    ranks = (
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_rank(),
    )
    for leaf in nested_values(model):
        if is_extra_state(leaf.key) and leaf.data is not None:
            kind = ".experts." in leaf.key
            if fits[kind] and ranks[kind]:
                leaf.key, leaf.replica_id = f"{leaf.key}.{ranks[kind]}", (*leaf.replica_id[:-1], 0)


def request(model: dict[str, Any], saved: Optional[list[int]], own: Optional[list[int]]) -> str:
    """Request the scales of this rank in a sharded model state that is to be loaded, where the checkpoint has them.

    Args:
        saved, own: `group_sizes` of the checkpoint and of this run, both with stateful scales.

    Returns:
        If the ranks get those of the first rank, a note for the user; else an empty string.
    """
    if saved == own is None:
        return ""
    if saved is None or own is None:
        fits = [False, False]
    else:
        fits = [before == now for before, now in zip(saved, own, strict=True)]
        name_by_rank(model, fits)
    if all(fits):
        return ""
    which = {(True, False): " of experts", (False, True): " outside of experts"}.get((fits[0], fits[1]), "")
    reason = (
        "the checkpoint has no others" if saved is None else f"the others fit {describe(saved)}, not {describe(own)}"
    )
    return f"all ranks start with the scales and amax histories{which} of the first rank ({FLAG}): {reason}"


def describe(sizes: Optional[list[int]]) -> str:
    """Return `group_sizes` as text."""
    if sizes is None:
        return "a run in which all ranks have the same"
    return f"{sizes[0]} data x context parallel ranks ({sizes[1]} with the same experts)"
