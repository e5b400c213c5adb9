"""A rollback that is killed: it is complete, or the restart comes to the bad step again and makes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty_run import STEPS, FaultyRun, assert_died
from forked_runs import prepare

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.directory import checkpoint_path, complete_steps
from megafp8.checkpoint.metadata import load_common_state, skip_history
from megafp8.checkpoint.progress import ROLLBACK, SkippedSamples

# Step 7 is bad whenever it runs. The run goes back from there to step 4, and skips samples 32 to 63.
BAD_STEP = "nan:rank=1,step=7,at=step.loss,times=9"
# Each rank has scales of its own.
BACK = "--spike-policy rollback --spike-rollback-steps 2 --spike-skip-batches 4 --tp-only-amax-red"


def start(run: FaultyRun, plan: str = BAD_STEP) -> object:
    return run.start(plan, f"--save {run.folder} --load {run.folder} {BACK}")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> FaultyRun:
    """A run that rolls back and is not killed."""
    prepare()
    folder = tmp_path_factory.mktemp("rollback")
    run = FaultyRun("dp2", folder / "unbroken", folder / "cache")
    ended = start(run)
    assert ended.statuses == (0, 0), ended.report()
    return run


@pytest.mark.parametrize(
    ("at", "left"),
    [
        pytest.param("load.begin", [4, 6], id="before the earlier checkpoint is loaded"),
        pytest.param("save.before_rename,step=8", [4, 6], id="before the new checkpoint has its name"),
        pytest.param("save.after_rename,step=8", [4, 6, 8], id="just after"),
        pytest.param("save.end,step=7", [4, 6, 8], id="before newer checkpoints are retired"),
    ],
)
def test_a_killed_rollback_is_made_once(unbroken: FaultyRun, at: str, left: list[int], tmp_path: Path) -> None:
    run = FaultyRun("dp2", tmp_path / "run", unbroken.cache)
    assert_died(start(run, f"{BAD_STEP};kill:rank=0,at={at}"))
    assert complete_steps(run.folder) == left, "those behind which it goes back stay until the rollback is saved"
    ended = start(run)
    assert ended.statuses == (0, 0), ended.report()

    history = skip_history(load_common_state(checkpoint_path(run.folder, STEPS)))
    assert history.num_rollbacks == 1 and history.skipped == (SkippedSamples(32, 64, 7, ROLLBACK),)
    assert run.fingerprint(STEPS) == unbroken.fingerprint(STEPS)
    assert run.losses() == unbroken.losses()
    assert sorted(path.name for path in run.folder.glob("*.retired*")) == ["iter_0000006.retired"]
    notes = [event.detail for event in load_run(run.folder).events if "was abandoned by a rollback" in event.detail]
    assert notes == ["iter_0000006 was abandoned by a rollback, renamed to iter_0000006.retired"]
