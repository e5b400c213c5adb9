"""The process groups of a layout are destroyed with it."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from ranks import run_ranks
from small_run import PLAIN, small_config

from megafp8.mcore.process_groups import build_process_groups, destroy_process_groups


def known_groups() -> tuple[bool, bool]:
    """Whether torch.distributed has a group of the layout before and after it is left; the world group remains."""
    config = small_config("llama", PLAIN)
    build_process_groups(config.model, config.parallel)
    group = parallel_state.get_data_parallel_group()
    before = is_known(group)
    destroy_process_groups()
    dist.barrier()
    return before, is_known(group)


def is_known(group: dist.ProcessGroup) -> bool:
    try:
        return dist.get_process_group_ranks(group) == [0]
    except KeyError:
        return False


def test_process_groups_are_destroyed_with_their_layout() -> None:
    assert run_ranks(1, known_groups) == [(True, False)]
