"""What ranks exchange for a checkpoint: only rank 0 gets the lists of all ranks."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks
from small_run import build_run, small_config

from megafp8.checkpoint.async_save import AsyncSaver
from megafp8.checkpoint.directory import checkpoint_path
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.save import save_checkpoint

# Of a number, a name or an error. The list of what a rank writes has more than 10 000.
SMALL_BYTES = 500


@pytest.mark.parametrize("is_async", [False, True])
def test_no_rank_but_the_first_gets_the_lists_of_all(
    is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config("llama", "--transformer-impl local --use-distributed-optimizer", 2)
    sizes: list[int] = []
    gather = dist.all_gather_object

    def counted(object_list: list[object], obj: object, group: object = None) -> None:
        sizes.append(len(pickle.dumps(obj)))
        gather(object_list, obj, group)

    monkeypatch.setattr(dist, "all_gather_object", counted)

    def save_and_load() -> list[int]:
        run = build_run(config)
        sizes.clear()
        if is_async:
            saver = AsyncSaver(config, run.training_state, 60.0, run.platform.device)
            saver.begin(tmp_path, Progress(0, 0)).poll(is_waiting=True)
        else:
            save_checkpoint(tmp_path, config, run.training_state, Progress(0, 0))
        load_checkpoint(checkpoint_path(tmp_path, 0), config, run.training_state)
        return sizes

    ranks = run_ranks(2, save_and_load)
    assert all(ranks)
    assert max(size for each in ranks for size in each) < SMALL_BYTES
