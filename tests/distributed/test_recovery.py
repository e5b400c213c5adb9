"""Runs survive damaged checkpoints, failed saves and leftovers of killed runs, and go back when requested."""

from __future__ import annotations

import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks
from small_run import PLAIN, build_run, fingerprint, small_config, weights

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.directory import POINTER, complete_steps, list_steps
from megafp8.checkpoint.manifest import MANIFEST
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.resume_point import choose_checkpoint
from megafp8.checkpoint.save import save_checkpoint
from megafp8.config.checkpoint_size import min_checkpoint_bytes
from megafp8.errors import CheckpointError
from megafp8.training.pretrain import train

LENGTH = "--train-iters 6 --lr-warmup-iters 1 --eval-iters 0 --no-progress-bar --save-interval 2"


def run_loop(folder: Path, flags: str = "", world_size: int = 1) -> tuple[Progress, str]:
    """One start of a run on every rank: its last step, and rank 0's weights."""
    config = small_config("llama", f"{LENGTH} {PLAIN} --save {folder} --load {folder} {flags}", world_size)

    def start() -> tuple[Progress, str]:
        run = build_run(config)
        return train(run), fingerprint(weights(run))

    return run_ranks(world_size, start)[0]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two ranks that saved steps 2, 4 and 6, and its weights. Tests must not write to it."""
    folder = tmp_path_factory.mktemp("unbroken")
    progress, digest = run_loop(folder, world_size=2)
    assert progress.step == 6
    return folder, digest


@pytest.fixture
def folder(unbroken: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of its folder that a test may change."""
    return Path(shutil.copytree(unbroken[0], tmp_path / "run"))


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def details(folder: Path, name: str) -> list[str]:
    return [event.detail for event in load_run(folder).events if event.name == name]


def test_the_newest_complete_checkpoint_is_used(folder: Path, unbroken: tuple[Path, str]) -> None:
    """Two kinds of damage. The findings are named and kept, and the run ends as it would without damage."""
    flip(next((folder / "iter_0000006").glob("__1_*.distcp")))
    (folder / "iter_0000004" / MANIFEST).unlink()
    (folder / POINTER).write_text("9999\n")
    assert run_loop(folder, world_size=2) == (Progress(6, 48), unbroken[1])
    assert complete_steps(folder) == [2, 4, 6]
    assert {"iter_0000006.corrupt", "iter_0000004.corrupt"} <= {path.name for path in folder.iterdir()}
    notes = " ".join(details(folder, "checkpoint"))
    assert "iter_0000006 is damaged (__1_" in notes
    assert "iter_0000004 is damaged (manifest.json is missing" in notes
    assert "loaded" in notes and "iter_0000002" in notes


def test_size_verification_does_not_detect_a_flipped_bit(folder: Path) -> None:
    flip(next((folder / "iter_0000006").glob("__1_*.distcp")))
    choose = lambda with_hashes: choose_checkpoint(folder, with_hashes=with_hashes)  # noqa: E731
    assert run_ranks(2, choose, False)[1].step == 6
    chosen = run_ranks(2, choose, True)
    assert chosen[0] == chosen[1]
    assert chosen[0].step == 4
    assert list_steps(folder) == [2, 4, 6], "a folder that is not the run's own is left as it is"


def refusal(folder: Path, step: int | None = None) -> str:
    """What every rank reports about a folder's checkpoints."""

    def choose() -> str:
        with pytest.raises(CheckpointError) as caught:
            choose_checkpoint(folder, step=step, is_own=True)
        return str(caught.value)

    first, second = run_ranks(2, choose)
    assert first == second
    return first


def test_a_run_never_restarts_over_damaged_checkpoints(folder: Path) -> None:
    for step in (2, 4, 6):
        (folder / f"iter_{step:07d}" / "common.pt").unlink()
    text = refusal(folder)
    assert "has no complete checkpoint" in text
    assert text.count("common.pt is missing") == 3
    assert list_steps(folder) == [2, 4, 6], "and nothing is renamed"


def test_a_requested_damaged_step_is_refused(folder: Path) -> None:
    flip(folder / "iter_0000004" / ".metadata")
    assert "has no complete checkpoint of step 4" in refusal(folder, 4)
    assert "--ckpt-step 3" in refusal(folder, 3)


def test_going_back_retires_newer_checkpoints(folder: Path, unbroken: tuple[Path, str]) -> None:
    """Otherwise the next start would resume from the abandoned run."""
    assert run_loop(folder, "--ckpt-step 2 --exit-interval 3", world_size=2)[0] == Progress(3, 24)
    assert complete_steps(folder) == [2, 3]
    assert {"iter_0000004.retired", "iter_0000006.retired"} <= {path.name for path in folder.iterdir()}
    assert run_loop(folder, world_size=2) == (Progress(6, 48), unbroken[1])


def test_the_newest_n_checkpoints_are_kept(tmp_path: Path) -> None:
    run_loop(tmp_path, "--ckpt-keep 2")
    assert complete_steps(tmp_path) == [4, 6]


def test_the_newest_of_temporary_and_permanent_checkpoints_is_used(unbroken: tuple[Path, str], tmp_path: Path) -> None:
    """Frequent checkpoints, of which only the newest is kept, beside permanent ones."""
    run, fast = tmp_path / "run", tmp_path / "fast"
    flags = f"--save-interval 4 --non-persistent-save-interval 1 --non-persistent-global-ckpt-dir {fast} --async-save"
    assert run_loop(run, flags, world_size=2) == (Progress(6, 48), unbroken[1])
    assert (complete_steps(run), complete_steps(fast)) == ([4, 6], [5])
    shutil.rmtree(run / "iter_0000006")
    assert run_loop(run, flags, world_size=2) == (Progress(6, 48), unbroken[1])
    assert any("loaded" in note and "fast/iter_0000005" in note for note in details(run, "checkpoint"))
    shutil.rmtree(run / "iter_0000006")
    flip(next((fast / "iter_0000005").glob("__1_*.distcp")))
    assert run_loop(run, flags, world_size=2) == (Progress(6, 48), unbroken[1])
    assert any("loaded" in note and "run/iter_0000004" in note for note in details(run, "checkpoint"))
    assert (fast / "iter_0000005.corrupt").exists()
    assert complete_steps(fast) == [5], "written again"
    run_loop(run, f"{flags} --ckpt-step 4 --exit-interval 5", world_size=2)
    assert (fast / "iter_0000005.retired").exists()


@pytest.mark.parametrize("flags", [PLAIN, "--bf16", f"{PLAIN} --no-save-optim", "--bf16 --use-distributed-optimizer"])
def test_checkpoint_size_is_known_in_advance(flags: str, tmp_path: Path) -> None:
    config = small_config("llama", f"--transformer-impl local {flags} --save {tmp_path}")

    def save() -> tuple[int, int]:
        run = build_run(config)
        path = save_checkpoint(tmp_path, config, run.training_state, Progress(1, 8))
        return min_checkpoint_bytes(run.config, run.vocab_size), sum(
            file.stat().st_size for file in path.glob("*.distcp")
        )

    ((least, found),) = run_ranks(1, save)
    assert 0.8 * found < least < found


def test_a_start_removes_incomplete_checkpoints(folder: Path) -> None:
    (folder / "iter_0000006").rename(folder / "iter_0000006.replaced")
    (folder / "iter_0000008.unfinished").mkdir()
    assert run_loop(folder, world_size=2)[0].step == 6
    names = {path.name for path in folder.iterdir()}
    assert complete_steps(folder) == [2, 4, 6] and not {name for name in names if name.endswith(("ed", "corrupt"))}


def test_training_continues_after_a_failed_save(tmp_path: Path, unbroken: tuple[Path, str], capfd) -> None:
    """A failed save is recorded and reported. The end of the run and the other checkpoints are unchanged."""
    (tmp_path / "iter_0000004.unfinished").write_text("a file in the way, which cannot be swept as a folder is")
    assert run_loop(tmp_path, world_size=2) == (Progress(6, 48), unbroken[1])
    assert complete_steps(tmp_path) == [2, 6]
    (detail,) = details(tmp_path, "checkpoint failed")
    assert f"step 4 cannot be saved to {tmp_path}: rank 0: FileExistsError" in detail
    assert capfd.readouterr().err.count(f"megafp8: {detail}; training continues without this checkpoint") == 1


def test_a_run_with_a_failed_last_save_fails(tmp_path: Path) -> None:
    (tmp_path / "iter_0000006.unfinished").write_text("in the way")
    with pytest.raises(AssertionError, match="step 6 cannot be saved") as caught:
        run_loop(tmp_path)
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert complete_steps(tmp_path) == [2, 4]


def test_a_disk_failure_on_one_rank_fails_the_save_on_all(tmp_path: Path) -> None:
    """Files of rank 1 are limited to 100 kB. No partial file is left, and the next save succeeds."""
    config = small_config("llama", f"{PLAIN} --tensor-model-parallel-size 2", 2)

    def save() -> str:
        run = build_run(config)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(tmp_path, config, run.training_state, Progress(3, 24))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        dist.barrier()
        left = [path.name for path in tmp_path.iterdir()]
        dist.barrier()
        save_checkpoint(tmp_path, config, run.training_state, Progress(4, 32))
        assert left == []
        return str(caught.value)

    texts = run_ranks(2, save)
    assert "File too large" in texts[0]
    assert complete_steps(tmp_path) == [4]
