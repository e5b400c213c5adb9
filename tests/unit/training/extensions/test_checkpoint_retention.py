"""Which checkpoints a run keeps."""

from typing import Optional

import pytest

from megafp8.checkpoint.directory import Retention
from megafp8.config.schema import CheckpointConfig
from megafp8.training.extensions.checkpoints import retention


@pytest.mark.parametrize(
    ("keep", "interval", "expected"),
    [
        (None, None, None),
        (3, None, Retention(3)),
        (None, 20, Retention(1, 20)),
        (2, 20, Retention(2, 20)),
    ],
)
def test_flags_say_which_checkpoints_are_kept(
    keep: Optional[int], interval: Optional[int], expected: Optional[Retention]
) -> None:
    assert retention(CheckpointConfig(ckpt_keep=keep, save_retain_interval=interval)) == expected
