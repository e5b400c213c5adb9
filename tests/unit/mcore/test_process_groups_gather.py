"""Forced gathers of weights."""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megafp8.mcore import patches, process_groups
from megafp8.training.evaluation import evaluation_mode

# Since 0.19 megatron-core makes them itself.
COPIES = ["transpose"] if patches.is_installed("<0.19") else []


class Chunk(torch.nn.Module):
    """A chunk whose only weight counts as stored in FP8."""

    def __init__(self, is_overlapped: bool, done: list[str]):
        super().__init__()
        self.ddp_config = SimpleNamespace(overlap_param_gather=is_overlapped)
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.weight.done = self.done = done

    def start_param_sync(self, **options: Any) -> None:
        assert options == {"force_sync": True}
        self.done.append("gather")

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        if param_sync:
            self.start_param_sync(force_sync=True)

    def enable_forward_pre_hook(self) -> None:
        self.done.append("hook")


@pytest.fixture(autouse=True)
def _weights_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "is_float8tensor", lambda weight: True)
    monkeypatch.setattr(
        process_groups, "post_all_gather_processing", lambda weights: weights[0].done.append("transpose")
    )


@pytest.mark.parametrize(("is_overlapped", "expected"), [(True, ["gather", *COPIES]), (False, ["gather"])])
def test_second_copies_are_made_after_the_gather(is_overlapped: bool, expected: list[str]) -> None:
    """Without overlap megatron-core makes them itself."""
    done: list[str] = []
    process_groups.gather_weights([Chunk(is_overlapped, done)])
    assert done == expected


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize(("is_overlapped", "expected"), [(True, ["gather", *COPIES, "hook"]), (False, [])])
def test_validation_gathers_with_second_copies(is_overlapped: bool, expected: list[str], fails: bool) -> None:
    """The next step gathers nothing, and its backward pass reads the second copies. Scales are put back, too."""
    done: list[str] = []
    remembered: list[str] = []
    run: Any = SimpleNamespace(
        config=SimpleNamespace(parallel=SimpleNamespace(overlap_param_gather=is_overlapped)),
        training_state=SimpleNamespace(chunks=[Chunk(is_overlapped, done)]),
        transformer_config=SimpleNamespace(param_sync_func=None),
        parts=[
            SimpleNamespace(
                begin_evaluation=lambda: remembered.append("remember"),
                end_evaluation=lambda: remembered.append("restore"),
            )
        ],
    )
    with contextlib.suppress(ValueError), evaluation_mode(run):
        assert done == [each for each in expected if each != "hook"] and remembered == ["remember"]
        if fails:
            raise ValueError
    assert done == expected and remembered == ["remember", "restore"]


def test_second_copies_after_a_gather_by_megatron_core_version() -> None:
    """0.16 only after a gather that it waits for itself, or where none is overlapped."""
    of_group = inspect.getsource(_ParamAndGradBucketGroup.start_param_sync)
    if COPIES:
        assert "post_all_gather_processing" not in of_group
        of_model = inspect.getsource(DistributedDataParallel.start_param_sync)
        before = of_model.index("if not self.ddp_config.overlap_param_gather")
        assert before < of_model.index("post_all_gather_processing")
    else:
        assert "force_sync and self.ddp_config.overlap_param_gather:\n            self._post_param_sync()" in of_group
