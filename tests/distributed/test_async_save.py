"""Checkpoints written while training continues equal those written in the foreground."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_run import FP8, PLAIN, build_run, fingerprint, small_config, train, weights

from megafp8.analysis.runs import load_run
from megafp8.checkpoint import save as saving
from megafp8.checkpoint.async_save import AsyncSaver, HostBuffers, HostCopy
from megafp8.checkpoint.directory import POINTER, Retention, complete_steps
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.manifest import read_manifest
from megafp8.checkpoint.progress import Progress
from megafp8.checkpoint.resume_point import choose_checkpoint
from megafp8.checkpoint.save import save_checkpoint
from megafp8.errors import CheckpointError, OutOfMemory
from megafp8.resilience import fault_injection
from megafp8.training.pretrain import train as train_loop
from megafp8.training.run import Run

DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000"
LENGTH = "--train-iters 6 --lr-warmup-iters 1 --eval-iters 0 --no-progress-bar --save-interval 2 --async-save"


def begin(run: Run, folder: Path, step: int, timeout_s: float = 60.0) -> Any:
    saves = AsyncSaver(run.config, run.training_state, timeout_s, run.platform.device)
    return saves, saves.begin(folder, Progress(step, step * run.global_batch_size))


def files_of(path: Path) -> dict[str, str]:
    """The tensors of a checkpoint: hashes of the files that ranks write, by name."""
    return {name: entry.sha256 for name, entry in read_manifest(path).files.items() if name.endswith(".distcp")}


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(1, PLAIN, id="fp32"),
        pytest.param(2, f"--bf16 {FP8} --attention-dropout 0.1 {DISTRIBUTED}", id="bf16-fp8-dp2-distributed"),
        pytest.param(2, "--bf16 --fp8-format hybrid --fp8-recipe delayed --tensor-model-parallel-size 2", id="delayed"),
        pytest.param(2, f"--bf16 {FP8} --fp8-param-gather {DISTRIBUTED}", id="fp8-param-gather"),
        pytest.param(
            4,
            f"--bf16 {FP8} --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2 {DISTRIBUTED}",
            id="tp2-dp2",
        ),
        pytest.param(
            2, "--fp16 --initial-loss-scale 256 --pipeline-model-parallel-size 2 --micro-batch-size 2", id="fp16-pp2"
        ),
    ],
)
def test_async_checkpoint_has_the_state_of_its_step(world_size: int, flags: str, tmp_path: Path) -> None:
    """Bitwise, although the copy is delayed until the next update is due, and the write by two more steps."""
    config = small_config("llama", flags, world_size)

    def save_both_ways() -> tuple[str, str]:
        run = build_run(config)
        train(run, 2)
        expected = files_of(save_checkpoint(tmp_path / "now", config, run.training_state, Progress(2, 16)))
        may_copy, may_write = threading.Event(), threading.Event()
        make, write, wait = HostCopy.make, saving.PreparedSave.write, HostCopy.wait

        def late_copy(self: HostCopy) -> None:
            assert may_copy.wait(60)
            make(self)

        def late_write(self: saving.PreparedSave, data_of: Any) -> Any:
            assert may_write.wait(60)
            return write(self, data_of)

        def let_copy(self: HostCopy, timeout_s: float) -> None:
            may_copy.set()
            wait(self, timeout_s)

        late_writing = mock.patch.object(saving.PreparedSave, "write", late_write)
        with mock.patch.multiple(HostCopy, make=late_copy, wait=let_copy), late_writing:
            _, under_way = begin(run, tmp_path / "later", 2)
            train(run, 2, 3)
            assert under_way.poll() is None
            may_write.set()
            path = under_way.poll(is_waiting=True)
        assert path == tmp_path / "later" / "iter_0000002"
        assert files_of(path) == expected
        return fingerprint(weights(run))

    def unbroken() -> str:
        run = build_run(config)
        train(run, 4)
        return fingerprint(weights(run))

    assert run_ranks(world_size, save_both_ways) == run_ranks(world_size, unbroken)


def test_next_save_reuses_plan_and_memory(tmp_path: Path) -> None:
    """Only if it has the same tensors. A reused plan of other tensors would omit or misplace some."""
    config = small_config("llama", f"--transformer-impl local {DISTRIBUTED}", 2)

    def save_twice() -> int:
        run = build_run(config)
        train(run, 1)
        saves, first = begin(run, tmp_path, 1)
        first.poll(is_waiting=True)
        buffers = {id(buffer) for buffer in saves._copies._tensors.values()}
        train(run, 1, 2)
        with mock.patch.object(saving, "save_state_dict_async_plan", side_effect=AssertionError("planned again")):
            saves.begin(tmp_path, Progress(2, 16)).poll(is_waiting=True)
        assert {id(buffer) for buffer in saves._copies._tensors.values()} == buffers
        other = next(leaf for leaf in saves._plan.structure if leaf[0].endswith("weight"))
        saves._plan.structure[saves._plan.structure.index(other)] = (f"{other[0]}2", *other[1:])
        if dist.get_rank() == 1:
            saves._plan.structure.clear()
        with mock.patch.object(
            saving, "save_state_dict_async_plan", side_effect=saving.save_state_dict_async_plan
        ) as planned:
            saves.begin(tmp_path, Progress(3, 24)).poll(is_waiting=True)
        return planned.call_count

    assert run_ranks(2, save_twice) == [1, 1]
    for step in complete_steps(tmp_path):
        assert run_ranks(2, lambda step=step: choose_checkpoint(tmp_path, step=step).step) == [step, step]


def run_loop(folder: Path, flags: str = "", world_size: int = 2) -> tuple[Progress, str]:
    config = small_config("llama", f"{LENGTH} {PLAIN} --save {folder} --load {folder} {flags}", world_size)

    def start() -> tuple[Progress, str]:
        run = build_run(config)
        return train_loop(run), fingerprint(weights(run))

    return run_ranks(world_size, start)[0]


def details(folder: Path, name: str) -> list[str]:
    return [f"{event.step}: {event.detail}" for event in load_run(folder).events if event.name == name]


def test_run_resumes_from_an_async_checkpoint(tmp_path: Path) -> None:
    progress, digest = run_loop(tmp_path / "unbroken")
    assert progress == Progress(6, 48)
    assert complete_steps(tmp_path / "unbroken") == [2, 4, 6]
    assert [line.split(":")[0] for line in details(tmp_path / "unbroken", "checkpoint saved")] == ["2", "4", "6"]
    assert run_loop(tmp_path / "parts", "--exit-interval 3 --ckpt-keep 1")[0] == Progress(3, 24)
    assert complete_steps(tmp_path / "parts") == [3], "the last one is there when the run ends"
    assert run_loop(tmp_path / "parts") == (progress, digest)


def slow(seconds_of_step: dict[int, float]) -> Any:
    """Patch writing so that it takes time on rank 1, by step."""
    write = saving.PreparedSave.write

    def slow_write(self: saving.PreparedSave, data_of: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(seconds_of_step.get(self.progress.step, 0.0))
        return write(self, data_of)

    return mock.patch.object(saving.PreparedSave, "write", slow_write)


def test_a_save_waits_for_the_previous_one(tmp_path: Path) -> None:
    with slow({2: 2.0}):
        assert run_loop(tmp_path, "--save-interval 1 --train-iters 4")[0] == Progress(4, 32)
    assert complete_steps(tmp_path) == [1, 2, 3, 4]
    assert any("for the checkpoint of step 2" in line for line in details(tmp_path, "checkpoint late"))


def test_a_hanging_writer_is_a_failed_save(tmp_path: Path) -> None:
    """Training continues, the next saves succeed, and nothing keeps the ranks from exiting."""
    began = time.monotonic()
    with slow({2: 1000.0}):
        assert run_loop(tmp_path, "--async-save-timeout 2")[0] == Progress(6, 48)
    assert time.monotonic() - began < 60
    assert complete_steps(tmp_path) == [4, 6]
    (failed,) = details(tmp_path, "checkpoint failed")
    assert failed.startswith("2: step 2 cannot be saved to")
    assert "rank 1: writing takes longer than 2 s; raise --async-save-timeout" in failed
    assert "iter_0000002" not in {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("location", ["save.before_rename", "save.before_pointer", "save.after_pointer"])
def test_an_abandoned_save_publishes_and_deletes_nothing(location: str, tmp_path: Path) -> None:
    config, point = small_config("llama", PLAIN), fault_injection.point
    is_there, may_go_on = threading.Event(), threading.Event()

    def held(name: str, step: Optional[int] = None) -> None:
        point(name, step)
        if name == location and step == 2:
            is_there.set()
            assert may_go_on.wait(60)

    def seen() -> tuple[list[str], str]:
        return sorted(path.name for path in tmp_path.glob("iter_*")), (tmp_path / POINTER).read_text()

    def save() -> None:
        run = build_run(config)
        save_checkpoint(tmp_path, config, run.training_state, Progress(1, 8))
        saves = AsyncSaver(config, run.training_state, 60.0, run.platform.device)
        with mock.patch.object(fault_injection, "point", held):
            under_way = saves.begin(tmp_path, Progress(2, 16), keep=Retention(1))
            while not is_there.wait(0.05):
                assert under_way.poll() is None
            under_way._deadline = time.monotonic()
            with pytest.raises(CheckpointError, match="writing takes longer than 60 s"):
                under_way.poll()
            before = seen()
            may_go_on.set()
            assert "cancelled" in str(under_way._work.exception(timeout=60))
        assert seen() == before and before[0][0] == "iter_0000001"

    run_ranks(1, save)


def test_a_hanging_copy_is_a_failed_save(tmp_path: Path) -> None:
    """The update proceeds after the timeout, so the partial copy must not become a checkpoint."""
    config, make = small_config("llama", PLAIN), HostCopy.make
    may_copy = threading.Event()

    def late_copy(self: HostCopy) -> None:
        assert may_copy.wait(60)
        make(self)

    def save() -> None:
        run = build_run(config)
        with mock.patch.object(HostCopy, "make", late_copy):
            _, under_way = begin(run, tmp_path, 1, timeout_s=1.0)
            train(run, 1)
            may_copy.set()
            assert under_way._work.exception(timeout=60) is not None
            with pytest.raises(CheckpointError, match="step 1 cannot be saved .* not complete before the weights"):
                under_way.poll(is_waiting=True)

    run_ranks(1, save)
    assert complete_steps(tmp_path) == []


@pytest.mark.parametrize("mode", ["", "--async-save"])
def test_consecutive_failed_saves_stop_the_run(mode: str, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def run() -> tuple[Progress, str]:
        return run_loop(tmp_path, f"--save-interval 1 --ckpt-max-failures 2 {mode}", world_size=1)

    with mock.patch.object(saving.PreparedSave, "write", fail), pytest.raises(AssertionError) as caught:
        run()
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert "2 consecutive saves failed (--ckpt-max-failures 2)" in str(caught.value.__cause__)
    assert len(details(tmp_path, "checkpoint failed")) == 2
    assert complete_steps(tmp_path) == []


def test_no_memory_for_a_copy_is_reported(tmp_path: Path) -> None:
    with mock.patch("psutil.virtual_memory", return_value=mock.Mock(available=10)):
        value = torch.zeros(1000)
        with pytest.raises(OutOfMemory, match=r"--async-save needs 0\.000 GB of host memory"):
            HostBuffers().allocate({"index": value})


def test_a_load_waits_for_pending_copies(tmp_path: Path) -> None:
    """Loading changes the weights, so it waits for the copies as an update does."""
    config = small_config("llama", PLAIN)

    def go_back() -> bool:
        run = build_run(config)
        train(run, 1)
        first = save_checkpoint(tmp_path, config, run.training_state, Progress(1, 8))
        train(run, 1, 2)
        _, under_way = begin(run, tmp_path, 2)
        at_2 = files_of(save_checkpoint(tmp_path / "now", config, run.training_state, Progress(2, 16)))
        load_checkpoint(first, config, run.training_state)
        return files_of(under_way.poll(is_waiting=True)) == at_2 and not run.training_state.pending_copies

    assert run_ranks(1, go_back) == [True]
