"""Kills and full disks while checkpoints are written asynchronously, in threads and at later steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_run import STEPS, FaultyRun
from test_kill_anywhere import assert_equal, run_through

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.directory import checkpoint_path, complete_steps
from megafp8.checkpoint.manifest import find_damage

# The step is that of the checkpoint, also in threads that run later. Faults after the rename need one step each.
KILLS = (
    "kill:rank=1,at=save.mid_shard,step=2", "kill:rank=0,at=step.before_update,step=3",
    "kill:rank=1,at=save.shards_written,step=4", "kill:rank=0,at=save.before_rename,step=6",
    "kill:rank=0,at=save.after_rename,step=8", "kill:rank=1,at=save.end,step=12",
)  # fmt: skip


class AsyncRun(FaultyRun):
    """The run of the other fault tests with `--async-save`."""

    def text(self, flags: str | None) -> str:
        return f"{super().text(flags)} --async-save"


@pytest.mark.slow
def test_killed_beside_training(tmp_path: Path, cache: Path, unbroken: dict[str, FaultyRun]) -> None:
    """The final state equals that of the run without faults that saved in the foreground."""
    run = AsyncRun("dp2", tmp_path / "run", cache)
    run_through(run, list(KILLS))
    assert_equal(run, unbroken["dp2"])


def test_reported_checkpoints_exist(tmp_path: Path, cache: Path) -> None:
    """A disk is full in two saves. The run continues, and every other checkpoint that it reports is complete."""
    run = AsyncRun("dp2", tmp_path / "run", cache)
    ended = run.start("full:rank=1,at=save.mid_shard,step=4;full:rank=0,at=save.before_rename,step=6", flags=(
        f"--save {run.folder} --ckpt-keep {STEPS}"
    ))  # fmt: skip
    assert set(ended.statuses) == {0}, ended.report()
    events = load_run(run.folder).events
    failed = {event.step: event.detail for event in events if event.name == "checkpoint failed"}
    assert sorted(failed) == [4, 6]
    assert all("No space left on device" in detail for detail in failed.values())
    told = [event.step for event in events if event.name == "checkpoint saved"]
    assert told == complete_steps(run.folder) == [step for step in range(2, STEPS + 1, 2) if step not in failed]
    assert [find_damage(checkpoint_path(run.folder, step)) for step in told] == [[]] * len(told)
