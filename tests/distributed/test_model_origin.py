"""Runs hand the origin of their model on to their checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from small_run import PLAIN, build_run, small_config

from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint


@pytest.mark.parametrize("origin", [None, '{"model_type": "phi3"}'])
def test_a_checkpoint_keeps_the_origin(origin: str | None, tmp_path: Path) -> None:
    config = small_config("llama", PLAIN, 1)

    def save_and_load() -> list[Progress]:
        run = build_run(config)
        path = save_checkpoint(tmp_path, config, run.training_state, Progress(2, 16, origin=origin))
        return [
            load_checkpoint(path, config, run.training_state, weights_only).progress for weights_only in (False, True)
        ]

    assert run_ranks(1, save_and_load) == [[Progress(2, 16, origin=origin), Progress(origin=origin)]]
