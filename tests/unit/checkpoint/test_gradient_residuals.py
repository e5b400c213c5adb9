"""Which runs load the errors of FP8 gradients of a checkpoint, and what the others say."""

from __future__ import annotations

from typing import Any, Optional

import pytest
import torch

from megafp8.checkpoint.gradient_residuals import load, note_on_load

LAYOUT = {"rows": [[3, 2], [3, 2]], "exclude": ["*norm*"]}
OTHER = LAYOUT | {"exclude": ["none"]}


@pytest.mark.parametrize(
    ("saved", "own", "same_layout", "expected"),
    [
        (None, None, True, ""),
        (LAYOUT, LAYOUT, True, ""),
        (None, LAYOUT, True, "the checkpoint has none"),
        (LAYOUT, None, True, "this run has no --grad-reduce-fp8-error-feedback"),
        (LAYOUT, OTHER, True, "buckets or excluded parameters differ: the errors"),
        (LAYOUT, LAYOUT, False, "different layout: the errors"),
    ],
)
def test_errors_are_loaded_or_their_loss_is_reported(
    saved: Optional[dict[str, Any]], own: Optional[dict[str, Any]], same_layout: bool, expected: str
) -> None:
    note = note_on_load(saved, own, same_layout)
    assert expected in note and bool(note) == bool(expected)


def test_what_is_not_loaded_is_zero() -> None:
    """Also after a rollback, when errors of later steps are there."""
    residuals = [torch.ones(3, 4), torch.ones(2, 4)]
    load(residuals, {"0": torch.full((3, 4), 0.5)})
    assert residuals[0].unique().tolist() == [0.5] and residuals[1].unique().tolist() == [0.0]
