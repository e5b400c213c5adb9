"""Checkpoints in object storage: complete or absent at every moment, and the right one is downloaded."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from object_server import FAULTS, ObjectServer, object_server

from megafp8.checkpoint.convert.safetensors_files import publish_folder
from megafp8.checkpoint.directory import (
    Retention,
    checkpoint_path,
    complete_steps,
    make_unfinished_folder,
    publish,
    unfinished_path,
)
from megafp8.checkpoint.manifest import FileEntry, Manifest, find_damage
from megafp8.checkpoint.object_copies import BackgroundUpload, ObjectCopies, object_copies
from megafp8.checkpoint.resume_point import find_source, retire_newer
from megafp8.errors import CheckpointError
from megafp8.utils import object_store
from megafp8.utils.files import file_sha256
from megafp8.utils.object_store import ObjectError, RetryPolicy, local_path


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectServer]:
    with object_server() as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture
def server(running: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(
        object_store, "POLICY", RetryPolicy(attempts=3, backoff_s=0.005, timeout_s=10.0, request_retries=1)
    )
    yield running
    running.faults = lambda request: None


@pytest.fixture
def machine(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> Callable[[str], ObjectCopies]:
    """The run's copies as a machine with a cache of its own sees them."""

    def see(name: str) -> ObjectCopies:
        monkeypatch.setenv("MEGAFP8_CACHE", str(tmp_path / name))
        copies = object_copies(local_path(f"s3://bucket/{request.node.name}"))
        assert copies is not None
        copies.folder.mkdir(parents=True, exist_ok=True)
        return copies

    return see


def save(folder: Path, step: int, text: str = "") -> bytes:
    """A checkpoint of a local folder; returns its tensors."""
    make_unfinished_folder(folder, step)
    unfinished = unfinished_path(folder, step)
    content = f"tensors of {step}{text}".encode() * 100
    (unfinished / "__0_0.distcp").write_bytes(content)
    (unfinished / "common.pt").write_bytes(b"")
    files = {path.name: FileEntry(path.stat().st_size, file_sha256(path)) for path in unfinished.iterdir()}
    publish(folder, step, Manifest(step=step, consumed_samples=step, layout=(1,), saved_at=text, files=files))
    (folder / "records.jsonl").write_text(f"records to {step}")
    return content


def tensors(copies: ObjectCopies, step: int) -> bytes:
    return (checkpoint_path(copies.folder, step) / "__0_0.distcp").read_bytes()


def test_another_machine_gets_the_newest_checkpoint(machine: Callable[[str], ObjectCopies]) -> None:
    a = machine("a")
    contents = {step: save(a.folder, step) for step in (2, 4)}
    a.upload(2, None)
    a.upload(4, None)
    b = machine("b")
    assert b.download(None, is_own=True) == ()
    assert complete_steps(b.folder) == [4] and tensors(b, 4) == contents[4]
    assert find_damage(checkpoint_path(b.folder, 4)) == []
    assert (b.folder / "records.jsonl").read_text() == "records to 4"
    b.download(2, is_own=False)
    assert tensors(b, 2) == contents[2]
    with pytest.raises(ObjectError, match="no complete checkpoint of step 3"):
        b.download(3, is_own=False)


def test_a_local_copy_is_not_downloaded_again(machine: Callable[[str], ObjectCopies], server: ObjectServer) -> None:
    a = machine("a")
    save(a.folder, 2)
    a.upload(2, None)
    seen = len(server.requests)
    a.download(None, is_own=True)
    assert not [each for each in server.requests[seen:] if "__0_0" in each]
    (checkpoint_path(a.folder, 2) / "__0_0.distcp").write_bytes(b"damaged")
    a.download(None, is_own=True)
    assert find_damage(checkpoint_path(a.folder, 2)) == []


@pytest.mark.parametrize(
    "at", ["__0_0.distcp", "common.pt", "4/manifest.json", "_iteration.txt"], ids=["1", "2", "3", "4"]
)
def test_a_torn_upload_is_never_the_newest(
    machine: Callable[[str], ObjectCopies], server: ObjectServer, at: str
) -> None:
    """Whatever object is the first that cannot be written: as if the run was killed there."""
    a = machine("a")
    save(a.folder, 2)
    a.upload(2, None)
    save(a.folder, 4)
    is_dead = False

    def die(request: str) -> str | None:
        nonlocal is_dead
        is_dead = is_dead or (request.startswith("PUT") and at in request)
        return "500" if is_dead else None

    server.faults = die
    with pytest.raises(ObjectError, match=r"s3://bucket/.*: the service fails: status 500"):
        a.upload(4, Retention(1))
    server.faults = lambda request: None
    is_complete = at == "_iteration.txt"  # the manifest was the last of what decides
    b = machine("b")
    b.download(None, is_own=True)
    assert complete_steps(b.folder) == [4 if is_complete else 2]
    assert find_damage(checkpoint_path(b.folder, max(complete_steps(b.folder)))) == []
    # The first machine still has its newer checkpoint, and uploads it.
    a = machine("a")
    assert a.download(None, is_own=True) == () and complete_steps(a.folder)[-1] == 4
    a.upload(4, Retention(1))
    assert a.complete_steps() == [4] and list(a.listing()) == [4]
    assert a.store.read("latest_checkpointed_iteration.txt") == b"4\n"


def test_local_checkpoints_that_another_machine_overtook_are_set_aside(machine: Callable[[str], ObjectCopies]) -> None:
    a = machine("a")
    save(a.folder, 2)
    a.upload(2, None)
    save(a.folder, 8, "never uploaded")
    b = machine("b")
    b.download(None, is_own=True)
    content = save(b.folder, 4)
    b.upload(4, None)
    a = machine("a")
    (a.folder / "records.jsonl").write_text("records of the abandoned step 8")
    (note,) = a.download(None, is_own=True)
    assert "another machine has continued the run" in note
    assert (a.folder / "records.jsonl").read_text() == "records to 4"
    assert complete_steps(a.folder) == [2, 4] and tensors(a, 4) == content
    assert (a.folder / "iter_0000008.retired").is_dir()


def test_a_damaged_copy_there_falls_back_to_the_one_before(machine: Callable[[str], ObjectCopies]) -> None:
    a = machine("a")
    for step in (2, 4):
        save(a.folder, step)
        a.upload(step, None)
    a.store.write("iter_0000004/__0_0.distcp", tensors(a, 4)[:-1] + b"X")
    b = machine("b")
    (note,) = b.download(None, is_own=True)
    assert "iter_0000004 is damaged" in note and "using the previous checkpoint" in note
    assert complete_steps(b.folder) == [2]


def test_retention_deletes_there_and_here(machine: Callable[[str], ObjectCopies]) -> None:
    a = machine("a")
    for step in (2, 4, 6, 8):
        save(a.folder, step)
        a.upload(step, Retention(2, interval=4))
    assert a.complete_steps() == [4, 6, 8] and complete_steps(a.folder) == [6, 8]


def test_retired_checkpoints_are_kept_but_not_found(machine: Callable[[str], ObjectCopies]) -> None:
    a = machine("a")
    for step in (2, 4):
        save(a.folder, step)
        a.upload(step, None)
    b = machine("b")
    b.download(2, is_own=True)
    (note,) = retire_newer(b.folder, 2)
    assert note.startswith("iter_0000004 is newer than step 2") and b.complete_steps() == [2]
    assert len(b.listing()[4]) == 3
    c = machine("c")
    c.download(None, is_own=True)
    assert complete_steps(c.folder) == [2]


def test_a_checkpoint_of_the_same_step_replaces_the_other(machine: Callable[[str], ObjectCopies]) -> None:
    a = machine("a")
    save(a.folder, 2)
    a.upload(2, None)
    content = save(a.folder, 2, " again")
    a.upload(2, None)
    b = machine("b")
    b.download(None, is_own=True)
    assert tensors(b, 2) == content and find_damage(checkpoint_path(b.folder, 2)) == []


def test_a_damaged_local_checkpoint_is_not_uploaded(machine: Callable[[str], ObjectCopies]) -> None:
    a = machine("a")
    save(a.folder, 2)
    (checkpoint_path(a.folder, 2) / "__0_0.distcp").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match="cannot be uploaded: __0_0.distcp has 3 bytes"):
        a.upload(2, None)
    assert a.complete_steps() == []


def test_an_upload_in_the_background(machine: Callable[[str], ObjectCopies], server: ObjectServer) -> None:
    a = machine("a")
    save(a.folder, 2)
    upload = BackgroundUpload(a, 2)
    server.faults = lambda request: "503" if "common.pt" in request else None
    upload.begin(2, None)
    assert upload.wait(20) and not upload.has_succeeded
    step, text, is_success = upload.take_result()
    assert (step, is_success) == (2, False) and "common.pt: the service fails: status 503 (SlowDown)" in text
    server.faults = lambda request: None
    upload.begin(2, None)
    assert upload.wait(20) and upload.has_succeeded and upload.take_result()[2]


def test_random_faults_over_saves_and_resumes(
    machine: Callable[[str], ObjectCopies], server: ObjectServer, tmp_path: Path
) -> None:
    """A machine that is lost after any upload leaves a newest checkpoint that is intact and no older than the last."""
    draw = random.Random(11)
    durable, contents, num_faults = 0, {}, 0

    def fault(request: str) -> str | None:
        nonlocal num_faults
        if draw.random() > 0.25:
            return None
        num_faults += 1
        return draw.choice([each for each in FAULTS if each != "hang"])

    for step in range(2, 24, 2):
        a = machine("a")
        contents[step] = save(a.folder, step)
        server.faults = fault
        try:
            a.upload(step, Retention(2))
            durable = step
        except ObjectError as error:
            assert str(error).startswith("s3://bucket/")
        server.faults = lambda request: None
        b = machine("b")
        server.faults = fault
        try:
            b.download(None, is_own=False)
        except ObjectError as error:
            assert str(error).startswith("s3://bucket/")
        server.faults = lambda request: None
        b.download(None, is_own=False) if durable else None
        newest = max(complete_steps(b.folder), default=0)
        assert newest >= durable, f"step {durable} is lost"
        assert not newest or (
            tensors(b, newest) == contents[newest] and not find_damage(checkpoint_path(b.folder, newest))
        )
        shutil.rmtree(tmp_path / "b")
    assert num_faults >= 40 and durable >= 10


def test_other_folders_have_no_copies(tmp_path: Path) -> None:
    assert object_copies(tmp_path) is None and object_copies(None) is None


def test_exported_folders_are_uploaded(
    machine: Callable[[str], ObjectCopies], server: ObjectServer, tmp_path: Path
) -> None:
    out = machine("a").folder / "model"
    with publish_folder(out) as folder:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
    copies = object_copies(out)
    assert copies is not None and set(copies.store.find()) == {"config.json", "model.safetensors"}
    assert [each for each in server.requests if each.startswith("PUT")][-1].endswith("/model/config.json")
    shutil.rmtree(out)
    server.faults = lambda request: "denied" if "PUT" in request else None
    with (
        pytest.raises(CheckpointError, match="other is complete, but was not uploaded: s3://bucket/.*access is denied"),
        publish_folder(out.with_name("other")) as folder,
    ):
        (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"{copies.store.url} exists".replace("[", ".")), publish_folder(out):
        pass


def test_commands_read_runs_in_object_storage(machine: Callable[[str], ObjectCopies]) -> None:
    a = machine("a")
    save(a.folder, 2)
    a.upload(2, None)
    b = machine("b")
    assert find_source(b.folder).path == checkpoint_path(b.folder, 2)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        find_source(b.folder / "other")
