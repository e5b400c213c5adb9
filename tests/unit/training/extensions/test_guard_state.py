"""The state of the guard in checkpoints: what it saves, what it loads from other versions, and what it refuses."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megafp8.mcore import cpu_patches

cpu_patches.install()

from megafp8.checkpoint.metadata import extension_states, skip_history
from megafp8.checkpoint.progress import Progress, SkipHistory
from megafp8.errors import CheckpointError
from megafp8.training.extension import LoopState
from megafp8.training.extensions.guard import LayerGuard

LOGITS, RESIDUAL = ("attention logits", "layers.0"), ("residual", "layers.1")
VALUES = {"layer_trends": ((*LOGITS, (1.5, 0.1 + 0.2)),), "warnings": (RESIDUAL,)}


def loaded(values: dict[str, Any]) -> LayerGuard:
    guard = LayerGuard()
    guard.load_state(values)
    return guard


def test_its_state_is_read_back() -> None:
    assert LayerGuard().state() == loaded({}).state() == {}
    assert loaded(VALUES).state() == VALUES
    assert loaded(json.loads(json.dumps(VALUES))).state() == VALUES


def test_after_a_rollback_warnings_stay_and_trends_go_back() -> None:
    guard = loaded({"layer_trends": ((*LOGITS, (1.5, 2.5)),), "warnings": (RESIDUAL, LOGITS)})
    guard.load_state(VALUES)
    assert guard.state() == {**VALUES, "warnings": (RESIDUAL, LOGITS)}
    guard.load_state({})
    assert guard.state() == {"layer_trends": (), "warnings": (RESIDUAL, LOGITS)}


def test_state_of_an_earlier_version_was_in_the_history() -> None:
    history = {**SkipHistory().plain(), **VALUES}
    assert skip_history({"history": history}) == SkipHistory()
    states = extension_states({"history": history})
    assert loaded(states[LayerGuard.name]).state() == VALUES
    assert extension_states({"history": SkipHistory().plain()}) == extension_states({}) == {}


@pytest.mark.parametrize(
    "values",
    [
        {"layer_trends": 7},
        {"layer_trends": [LOGITS]},
        {"layer_trends": [(*LOGITS, ("large",))]},
        {"layer_trends": [(*LOGITS, (10**400,))]},
        {"layer_trends": [(*LOGITS, torch.zeros(2, 2))]},
        {"layer_trends": [([], "layers.0", (1.0,))]},
        {"warnings": None},
        {"warnings": [("residual",)]},
        {"warnings": [("residual", 0)]},
    ],
    ids=str,
)
def test_other_values_are_an_error_of_the_checkpoint(values: dict[str, Any]) -> None:
    guard = LayerGuard()
    state: Any = SimpleNamespace(extensions=[guard])
    with pytest.raises(CheckpointError, match="the checkpoint's state of LayerGuard cannot be read: "):
        LoopState.load_extensions(state, Progress(extensions={LayerGuard.name: values}))
    assert guard.state() == {}
