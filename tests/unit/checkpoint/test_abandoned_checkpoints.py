"""Which checkpoints are retired because a rollback went back behind them."""

from __future__ import annotations

from pathlib import Path

from ranks import run_ranks

from megafp8.checkpoint.directory import checkpoint_path, list_steps
from megafp8.checkpoint.manifest import MANIFEST, build_manifest, write_manifest
from megafp8.checkpoint.progress import ROLLBACK, SPIKE, SkipHistory, SkippedSamples
from megafp8.checkpoint.resume_point import choose_rollback_checkpoint, retire_abandoned

# Steps of 8 samples. The run went back from step 7 to 4 and on to 8, and later skipped the update of step 10.
HISTORY = SkipHistory((SkippedSamples(32, 64, 7, ROLLBACK), SkippedSamples(72, 80, 10, SPIKE)), num_rollbacks=1)


def put(folder: Path, *steps: int) -> None:
    for step in steps:
        path = checkpoint_path(folder, step)
        path.mkdir(parents=True)
        write_manifest(path, build_manifest(path, step, 8 * step, (1, 1, 1)))


def test_those_between_the_two_positions_are_retired_once(tmp_path: Path) -> None:
    put(tmp_path, *range(2, 12))
    damaged = checkpoint_path(tmp_path, 5) / MANIFEST
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert retire_abandoned(tmp_path, SkipHistory((HISTORY.skipped[1],))) == ()
    assert retire_abandoned(tmp_path, HISTORY) == tuple(
        f"iter_000000{step} was abandoned by a rollback, renamed to iter_000000{step}.retired" for step in (6, 7)
    )
    assert list_steps(tmp_path) == [2, 3, 4, 5, 8, 9, 10, 11], "a damaged one is never loaded"
    assert retire_abandoned(tmp_path, HISTORY) == retire_abandoned(tmp_path / "absent", HISTORY) == ()


def test_no_rollback_returns_to_an_abandoned_one(tmp_path: Path) -> None:
    """They stay if the save of the first rollback fails. The second is at step 9, and 2 steps back is step 7."""
    put(tmp_path, 2, 4, 6, 7)

    def steps(history: SkipHistory) -> int:
        found = choose_rollback_checkpoint(tmp_path, step=7, history=history, with_hashes=False)
        assert found is not None
        return found.step

    assert run_ranks(1, lambda: (steps(SkipHistory()), steps(HISTORY))) == [(7, 4)]
