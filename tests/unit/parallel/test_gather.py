"""Forced gathers of weights."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megafp8.parallel import gather


class Chunk:
    """One whose only weight counts as kept in FP8."""

    def __init__(self, is_overlapped: bool, done: list[str]):
        self.ddp_config = SimpleNamespace(overlap_param_gather=is_overlapped)
        self.weight, self.done = torch.nn.Parameter(torch.zeros(2)), done

    def parameters(self) -> list[torch.nn.Parameter]:
        return [self.weight]

    def start_param_sync(self, **options: Any) -> None:
        assert options == {"force_sync": True}
        self.done.append("gather")


@pytest.mark.parametrize(("is_overlapped", "expected"), [(True, ["gather", "transpose"]), (False, ["gather"])])
def test_second_copies_are_made_after_the_gather(
    is_overlapped: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without overlap megatron-core makes them itself."""
    done: list[str] = []
    monkeypatch.setattr(gather, "is_float8tensor", lambda weight: True)
    monkeypatch.setattr(gather, "post_all_gather_processing", lambda weights: done.append("transpose"))
    gather.gather_weights([Chunk(is_overlapped, done)])
    assert done == expected


def test_megatron_core_does_not_yet() -> None:
    """Only after a gather that it waits for itself, or where none is overlapped."""
    assert "post_all_gather_processing" not in inspect.getsource(_ParamAndGradBucketGroup.start_param_sync)
    of_model = inspect.getsource(DistributedDataParallel.start_param_sync)
    assert of_model.index("if not self.ddp_config.overlap_param_gather") < of_model.index("post_all_gather_processing")
