"""An incomplete checkpoint is never found: all ranks are killed at each point of a save, and the rest is complete.

Steps are also saved a second time, over the first, by a run with other weights. The two are never mixed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from faulty_run import FaultyRun, assert_died

from megafp8.checkpoint.directory import POINTER, checkpoint_path, clean_up, complete_steps
from megafp8.checkpoint.manifest import find_damage
from megafp8.checkpoint.serialization import COMMON_FILE
from megafp8.resilience.fault_injection import POINTS
from megafp8.training import pretrain

LAYOUT, SAVED = "dp2", 2
SAVE_POINTS = [point for point in POINTS if point.startswith("save.") and point != "save.in_prune"]
# From here on the new checkpoint has its final name.
NAMED = SAVE_POINTS[SAVE_POINTS.index("save.after_rename") :]
SHORT = f"--save-interval 1 --exit-interval {SAVED} --eval-interval 100"


@pytest.fixture(scope="module")
def until_2(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> FaultyRun:
    """A run that saved steps 1 and 2. Tests must not write to its folder."""
    run = FaultyRun(LAYOUT, tmp_path_factory.mktemp("until_2") / "run", cache)
    ended = run.start(flags=f"--save {run.folder} {SHORT}")
    assert set(ended.statuses) == {0}, ended.report()
    assert complete_steps(run.folder) == [1, SAVED]
    return run


@pytest.fixture
def copied(until_2: FaultyRun, tmp_path: Path) -> FaultyRun:
    """A copy that a test may change."""
    shutil.copytree(until_2.folder, tmp_path / "run")
    return FaultyRun(LAYOUT, tmp_path / "run", until_2.cache)


def kill_all_at(point: str, step: int) -> str:
    """Rank 0 alone passes some of the points. It then kills the others too."""
    return f"kill:at={point},step={step}"


@pytest.mark.slow
@pytest.mark.parametrize("point", [point for point in SAVE_POINTS if point != "save.between_renames"])
def test_a_killed_save_keeps_the_previous_checkpoint(point: str, copied: FaultyRun) -> None:
    """The next start resumes from step 2, or from step 3 once that has its final name."""
    flags = f"--save {copied.folder} --load {copied.folder} --save-interval 1"
    assert_died(copied.start(kill_all_at(point, 3), flags))
    newest = 3 if point in NAMED else SAVED
    assert copied.newest == newest
    assert not any(find_damage(checkpoint_path(copied.folder, step)) for step in complete_steps(copied.folder))
    pointed = int((copied.folder / POINTER).read_text())
    assert pointed in (SAVED, newest) and pointed <= newest


@pytest.mark.slow
@pytest.mark.parametrize("point", SAVE_POINTS)
def test_overwriting_a_step_never_mixes_checkpoints(
    point: str, until_2: FaultyRun, copied: FaultyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run from the start with another seed overwrites step 1. The test disables the check that refuses it."""
    monkeypatch.setattr(pretrain, "check_no_newer_checkpoint", lambda config, step: None)
    before = until_2.fingerprint(1)
    ended = copied.start(kill_all_at(point, 1), flags=f"--save {copied.folder} {SHORT} --seed 4321")
    assert_died(ended)
    clean_up(copied.folder)
    assert complete_steps(copied.folder)[0] == 1 and copied.newest == SAVED
    assert find_damage(checkpoint_path(copied.folder, 1)) == []
    found = copied.fingerprint(1)
    assert (found != before) == (point in NAMED)
    assert all((found[part] == before[part]) == (point not in NAMED) for part in ("weights", "optimizer", "random"))
    assert copied.fingerprint(SAVED) == until_2.fingerprint(SAVED)


def test_a_start_leaves_out_a_checkpoint_with_a_flipped_bit(copied: FaultyRun) -> None:
    """Of its settings, which every start reads first."""
    path = checkpoint_path(copied.folder, SAVED) / COMMON_FILE
    content = bytearray(path.read_bytes())
    content[content.index(b"lr_warmup_samples")] ^= 1
    path.write_bytes(bytes(content))
    ended = copied.start(flags=f"--save {copied.folder} --load {copied.folder} {SHORT}")
    assert set(ended.statuses) == {0}, ended.report()
    name = path.parent.name
    assert (
        f"{name} is damaged ({COMMON_FILE} is damaged" in ended.output[0]
        and f"renamed to {name}.corrupt" in (ended.output[0])
    )
    assert complete_steps(copied.folder) == [1, SAVED] and (copied.folder / f"{name}.corrupt").is_dir()
