"""Whether the machines of a run share the cache of object storage. A rank stands for a machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Optional
from unittest import mock

import pytest
from ranks import run_ranks

from megafp8.checkpoint.object_copies import Machines
from megafp8.errors import CheckpointError
from megafp8.training.uploads import find_machines


def machines(folders: list[Path]) -> Optional[Machines]:
    import torch.distributed as dist

    with mock.patch.dict(os.environ, LOCAL_RANK="0"):
        return find_machines(folders[dist.get_rank()])


def refusal(folders: list[Path]) -> str:
    with pytest.raises(CheckpointError) as caught:
        machines(folders)
    return str(caught.value)


def test_machines_are_told_apart_by_what_they_see(tmp_path: Path) -> None:
    shared, *own = (tmp_path / name for name in "sabc")
    assert run_ranks(3, machines, [shared] * 3) == [None] * 3
    found = run_ranks(3, machines, own)
    assert [each.rank for each in found] == [0, 1, 2] and len({each.token for each in found}) == 1
    assert all(each.others == (1, 2) for each in found)
    assert all("set MEGAFP8_CACHE" in text for text in run_ranks(3, refusal, [own[0], shared, shared]))
    assert not list(tmp_path.glob("*/.machine*"))
