"""Runs of `megafp8 pretrain` with checkpoints and data in object storage: killed, moved to another machine, and with a
store that fails."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import forked_runs
import numpy as np
import pytest
from faulty_run import COMMON, STEPS, FaultyRun
from forked_runs import run_forked
from object_server import ObjectServer, object_server
from shard_writer import ShardWriter

from megafp8.analysis.runs import load_run
from megafp8.checkpoint.directory import complete_steps
from megafp8.errors import CheckpointError

# This process must not use obstore: the ranks are forked from it.
URL = "s3://bucket/run"
FOLDERS = f"--save {URL} --load {URL}"


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with object_server() as running:
        running.make_bucket("bucket")
        yield running


def machine(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> FaultyRun:
    """The run on a machine with an empty cache."""
    monkeypatch.setenv("MEGAFP8_CACHE", str(folder / name))
    return FaultyRun("dp2", folder / name / "s3/bucket/run", folder / "indices")


def machines(folder: Path, names: str, monkeypatch: pytest.MonkeyPatch, layout: str = "dp2") -> FaultyRun:
    """The run on two machines with caches of their own, which share the ranks; what it returns sees that of rank 0."""
    original = forked_runs.become_rank

    def become_rank(rank: int, world_size: int, output: Path) -> None:
        original(rank, world_size, output)
        machine, local = divmod(rank, world_size // len(names))
        os.environ |= {
            "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(world_size // len(names)),
            "MEGAFP8_CACHE": str(folder / names[machine]),
        }  # fmt: skip

    monkeypatch.setattr(forked_runs, "become_rank", become_rank)
    return FaultyRun(layout, folder / names[0] / "s3/bucket/run", folder / "indices")


def events(run: FaultyRun, name: str) -> list[tuple[int, str]]:
    return [(event.step, event.detail) for event in load_run(run.folder).events if event.name == name]


@pytest.mark.slow
def test_a_killed_run_continues_on_another_machine(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a store that fails at random. The end is that of a run on a local disk, to the bit."""
    reference = FaultyRun("dp2", tmp_path / "reference", tmp_path / "indices")
    assert set(reference.start().statuses) == {0}
    draw = random.Random(3)
    server.faults = lambda request: draw.choice(["500", "503", "cut", "lost"]) if draw.random() < 0.1 else None
    first = machine(tmp_path, "a", monkeypatch)
    assert 0 not in first.start("kill:rank=0,step=10,at=step.after_backward", FOLDERS).statuses
    second = machine(tmp_path, "b", monkeypatch)
    ended = second.start(flags=FOLDERS)
    assert set(ended.statuses) == {0}, ended.output
    (loaded,) = [text for _, text in events(second, "checkpoint") if text.startswith("loaded")]
    assert int(loaded[-7:]) in (4, 6, 8)
    assert second.fingerprint(STEPS) == reference.fingerprint(STEPS)
    assert second.losses() == reference.losses()
    assert events(second, "checkpoint uploaded")[-1][0] == STEPS
    assert any(f"PUT /bucket/run/iter_{STEPS:07d}/manifest.json" in request for request in server.requests)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--async-save"])
def test_machines_without_a_shared_folder_save_together(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    """Killed, and continued on two other machines, with a store that fails at random."""
    reference = FaultyRun("dp2", tmp_path / "reference", tmp_path / "indices")
    assert set(reference.start().statuses) == {0}
    draw = random.Random(7)
    server.faults = lambda request: draw.choice(["500", "503", "cut", "lost"]) if draw.random() < 0.05 else None
    with monkeypatch.context() as patch:
        first = machines(tmp_path, "ab", patch)
        assert 0 not in first.start("kill:rank=1,step=10,at=step.after_backward", f"{FOLDERS} {flags}").statuses
    assert complete_steps(first.folder) == []  # no machine has all of a checkpoint
    with monkeypatch.context() as patch:
        second = machines(tmp_path, "cd", patch)
        ended = second.start(flags=f"{FOLDERS} {flags}")
    assert set(ended.statuses) == {0}, ended.output
    (loaded,) = [text for _, text in events(second, "checkpoint") if text.startswith("loaded")]
    assert int(loaded[-7:]) in (4, 6, 8)
    assert second.losses() == reference.losses()
    assert events(second, "checkpoint uploaded")[-1][0] == STEPS
    assert not list(tmp_path.glob("[cd]/**/*.unfinished"))
    last = machine(tmp_path, "e", monkeypatch)
    assert set(last.start(flags=f"{FOLDERS} --train-iters {STEPS}").statuses) == {0}
    assert last.fingerprint(STEPS) == reference.fingerprint(STEPS)


@pytest.mark.slow
def test_machines_of_several_ranks_save_together(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = FaultyRun("tp2-pp2", tmp_path / "reference", tmp_path / "indices")
    assert set(reference.start().statuses) == {0}
    flags = f"{FOLDERS} --save-interval 8"
    run = machines(tmp_path, "ab", monkeypatch, "tp2-pp2")
    assert set(run.start("term:rank=3,step=9,at=step.begin", flags).statuses) == {75}
    # The same machines have parts of what they saved and copies of what they load.
    ended = run.start(flags=flags)
    assert set(ended.statuses) == {0}, ended.output
    assert run.losses() == reference.losses() and not list(tmp_path.glob("[ab]/**/*.unfinished"))
    uploaded = [request for request in server.requests if request.startswith(f"PUT /bucket/run/iter_{STEPS:07d}/__")]
    assert {request.split("/__")[1][0] for request in uploaded} == set("0123")


@pytest.mark.slow
def test_a_machine_that_cannot_upload_is_named(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one does not wait for it, and its part is not the newest checkpoint."""
    run = machines(tmp_path, "ab", monkeypatch)
    server.faults = lambda request: "denied" if request.startswith("PUT") and "/__1_" in request else None
    ended = run.start(flags=f"{FOLDERS} --ckpt-max-failures 1")
    assert set(ended.statuses) == {CheckpointError.exit_status}
    assert "/__1_" in ended.output[0] and "access is denied" in ended.output[0]
    assert not any("manifest.json" in request for request in server.requests if request.startswith("PUT"))
    assert not list(tmp_path.glob("[ab]/**/*.unfinished")) and "checkpoint saved" not in ended.output[0]


@pytest.mark.slow
def test_machines_without_a_shared_folder_cannot_roll_back(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = machines(tmp_path, "ab", monkeypatch).start(flags=f"{FOLDERS} --spike-policy rollback")
    assert set(ended.statuses) == {CheckpointError.exit_status}
    assert "--spike-policy rollback: the machines of this run do not share" in ended.output[0]


@pytest.mark.slow
def test_a_store_that_fails_ends_the_run_with_the_checkpoint_kept(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = machine(tmp_path, "a", monkeypatch)
    server.faults = lambda request: "denied" if request.startswith("PUT") else None
    ended = run.start(flags=f"{FOLDERS} --ckpt-max-failures 2")
    assert set(ended.statuses) == {CheckpointError.exit_status}
    assert (
        f"step 4 cannot be uploaded: {URL}/iter_0000004/" in ended.output[0] and "access is denied" in ended.output[0]
    )
    assert complete_steps(run.folder)[-1] == 4
    # The same machine resumes from its own copy, and uploads it.
    server.faults = lambda request: None
    assert set(run.start(flags=FOLDERS).statuses) == {0}
    assert any(text.endswith("iter_0000004") for _, text in events(run, "checkpoint"))
    assert [step for step, _ in events(run, "checkpoint uploaded")][0] == 4


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--async-save"])
def test_a_stopped_run_has_uploaded_its_checkpoint(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    run = machine(tmp_path, "a", monkeypatch)
    ended = run.start("term:rank=1,step=5,at=step.begin", f"{FOLDERS} {flags}")
    assert set(ended.statuses) == {75}
    step = complete_steps(run.folder)[-1]
    assert events(run, "checkpoint uploaded")[-1][0] == step
    assert any(f"PUT /bucket/run/iter_{step:07d}/manifest.json" in request for request in server.requests)


@pytest.mark.slow
def test_a_slow_link_is_reported_and_loses_nothing(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save waits. Non-persistent checkpoints, which stay in the cache, do not."""

    def slow(request: str) -> None:
        if request.startswith("PUT"):
            time.sleep(0.3)

    server.faults = slow
    run = machine(tmp_path, "a", monkeypatch)
    ended = run.start(flags=f"{FOLDERS} --save-interval 4 --non-persistent-save-interval 1")
    assert set(ended.statuses) == {0}, ended.output
    late = [step for step, text in events(run, "upload late") if "the link is too slow" in text]
    assert late and set(late) <= {8, 12, 16}
    assert [step for step, _ in events(run, "checkpoint uploaded")] == [4, 8, 12, 16]
    assert not any("non_persistent" in request for request in server.requests if request.startswith("PUT"))


@pytest.mark.slow
def test_shards_in_object_storage_train_like_local_ones(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through loader processes, which cannot use obstore themselves, and with a store that fails at random."""
    random_ids, prefix = np.random.default_rng(1), str(tmp_path / "corpus")
    with ShardWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(40):
            ids = random_ids.integers(0, 60, 64).astype(np.uint16)
            writer.add_documents(ids.tobytes(), np.array([len(ids)], np.int32))
        writer.finish()
    for suffix in (".bin", ".idx"):
        server.request("PUT", f"/bucket/data/corpus{suffix}", Path(prefix + suffix).read_bytes())
    draw = random.Random(5)
    server.faults = lambda request: draw.choice(["500", "cut"]) if draw.random() < 0.1 else None
    monkeypatch.setenv("MEGAFP8_CACHE", str(tmp_path / "cache"))
    losses = []
    for name, data_path in (("local", prefix), ("remote", "s3://bucket/data/corpus")):
        folder = tmp_path / name
        flags = COMMON.replace("--mock-data", f"--data-path {data_path} --split 70,30,0") + f" --save {folder}"
        ended = run_forked(2, flags, "", tmp_path / f"{name}_fired")
        assert set(ended.statuses) == {0}, ended.output
        losses.append({record.step: record.loss for record in load_run(folder).steps})
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    assert any("/bucket/data/corpus.bin" in request for request in server.requests)
