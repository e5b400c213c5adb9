"""Objects through obstore, against a local S3 server with faults."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_server import ACCESS_KEY, FAULTS, SECRET_KEY, ObjectServer, object_server

from megafp8.utils import object_store
from megafp8.utils.files import path_text
from megafp8.utils.object_store import (
    ObjectError,
    ObjectFolder,
    RetryPolicy,
    fetch,
    is_url,
    local_path,
    parse_url,
    place_argument,
    url_of,
)

QUICK = RetryPolicy(attempts=6, backoff_s=0.005, timeout_s=0.6, request_retries=1)


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectServer]:
    with object_server() as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture
def server(running: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectServer]:
    monkeypatch.setattr(object_store, "POLICY", QUICK)
    monkeypatch.setenv("MEGAFP8_CACHE", str(tmp_path / "cache"))
    yield running
    running.faults = lambda request: None


@pytest.fixture
def folder(server: ObjectServer, request: pytest.FixtureRequest) -> ObjectFolder:
    return ObjectFolder(f"s3://bucket/{request.node.name}")


def test_objects_are_written_read_listed_and_deleted(folder: ObjectFolder, tmp_path: Path) -> None:
    content = random.Random(1).randbytes(100_000)
    (tmp_path / "file").write_bytes(content)
    folder.upload(tmp_path / "file", "a/file")
    folder.write("pointer", b"7\n")
    assert folder.read("pointer") == b"7\n" and folder.read_range("a/file", 10, 20) == content[10:30]
    assert folder.read_ranges("a/file", [0, 5], 3) == [content[:3], content[5:8]]
    assert {name: info.num_bytes for name, info in folder.find().items()} == {"a/file": 100_000, "pointer": 2}
    assert set(folder.find(is_deep=False)) == {"pointer"}
    folder.download("a/file", tmp_path / "new" / "copy")
    assert (tmp_path / "new" / "copy").read_bytes() == content
    folder.rename("pointer", "pointer.old")
    folder.delete(["pointer.old", "absent", "a/file"])
    assert folder.find() == {} and folder.info("pointer") is None


def test_large_objects_go_in_parts(
    folder: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ObjectServer
) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)
    content = random.Random(2).randbytes(12 << 20)
    (tmp_path / "file").write_bytes(content)
    folder.upload(tmp_path / "file", "file")
    assert sum("partNumber=" in request for request in server.requests) >= 3
    folder.download("file", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content
    (tmp_path / "empty").touch()
    folder.upload(tmp_path / "empty", "empty")
    folder.download("empty", tmp_path / "empty copy")
    assert (tmp_path / "empty copy").read_bytes() == b""


def test_copies_in_the_cache_are_renewed(folder: ObjectFolder, tmp_path: Path, server: ObjectServer) -> None:
    for content in (b"first", b"other"):
        folder.write("index", content)
        fetch(folder, "index", tmp_path / "index")
        num_requests = len(server.requests)
        fetch(folder, "index", tmp_path / "index")
        assert (tmp_path / "index").read_bytes() == content and len(server.requests) == num_requests + 1
    (tmp_path / "index").write_bytes(b"cut")
    fetch(folder, "index", tmp_path / "index")
    assert (tmp_path / "index").read_bytes() == b"other"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("500", "status 500"), ("503", "SlowDown"), ("hang", "timeout"), ("reset", "connection"),
        ("skew", "the clock of this machine is wrong"), ("denied", "access is denied"), ("key", "not accepted"),
    ],
)  # fmt: skip
def test_errors_name_the_object_and_no_secret(
    folder: ObjectFolder, server: ObjectServer, monkeypatch: pytest.MonkeyPatch, fault: str, words: str
) -> None:
    monkeypatch.setattr(object_store, "POLICY", RetryPolicy(2, 0.005, 0.3, 0))
    folder = ObjectFolder(folder.url)
    folder.write("name", b"content")
    server.faults = lambda request: fault
    for action in (lambda: folder.read("name"), lambda: folder.write("name", b"x"), lambda: folder.delete(["name"])):
        with pytest.raises(ObjectError) as caught:
            action()
        assert f"{folder.url}/name: " in str(caught.value) and words in str(caught.value)
        shown = "".join(traceback.format_exception(caught.value))
        assert ACCESS_KEY not in shown and SECRET_KEY not in shown
    server.faults = lambda request: None
    assert folder.read("name") == b"content"


def test_a_truncated_body_is_never_taken(folder: ObjectFolder, server: ObjectServer, tmp_path: Path) -> None:
    folder.write("name", b"0123456789" * 100)
    server.faults = lambda request: "cut" if request.startswith("GET") else None
    with pytest.raises(ObjectError, match="/name: "):
        folder.download("name", tmp_path / "copy")
    assert list(tmp_path.iterdir()) == []


def test_wrong_content_and_replaced_objects_are_refused(folder: ObjectFolder, tmp_path: Path) -> None:
    folder.write("name", b"content")
    with pytest.raises(ObjectError, match="/name: damaged: SHA-256 ed7002b439e9"):
        folder.download("name", tmp_path / "copy", sha256="0" * 64)
    info = folder.info("name")
    assert info is not None and list(tmp_path.iterdir()) == []
    folder.write("name", b"another")
    with pytest.raises(ObjectError, match="/name: it was replaced while it was read"):
        folder.read_range("name", 0, 4, info.etag)


def test_missing_objects_and_buckets(folder: ObjectFolder) -> None:
    with pytest.raises(ObjectError, match="/absent: no such object"):
        folder.read("absent")
    for action in (
        lambda each: each.find(),
        lambda each: each.write("name", b""),
        lambda each: each.read_range("n", 0, 1),
    ):
        with pytest.raises(ObjectError, match=r"s3://no-such-bucket/run.*: no such bucket"):
            action(ObjectFolder("s3://no-such-bucket/run"))


def test_200_random_faults_lose_and_tear_nothing(folder: ObjectFolder, server: ObjectServer, tmp_path: Path) -> None:
    draw, num_faults = random.Random(7), 0
    contents: dict[str, set[bytes | None]] = {}

    def fault(request: str) -> str | None:
        nonlocal num_faults
        if draw.random() < 0.5:
            return None
        num_faults += 1
        # A hang takes its time, so it is drawn less often.
        return draw.choices(FAULTS, weights=[4, 4, 4, 0.5, 4, 4])[0]

    def check(name: str) -> None:
        found = folder.read(name) if folder.info(name) else None
        assert found in contents.get(name, {None}), f"{name} is torn or lost"
        contents[name] = {found}

    failed = 0
    while num_faults < 200:
        name, content = f"object-{draw.randrange(4)}", draw.randbytes(draw.randrange(1, 3000))
        action = draw.choice(["write", "upload", "read", "download", "delete"])
        before = contents.get(name, {None})
        server.faults = fault
        try:
            if action == "write":
                folder.write(name, content)
            elif action == "upload":
                (tmp_path / "file").write_bytes(content)
                folder.upload(tmp_path / "file", name)
            elif action == "read":
                assert folder.read(name) in before
            elif action == "download":
                folder.download(name, tmp_path / "copy")
                assert (tmp_path / "copy").read_bytes() in before
            else:
                folder.delete([name])
        except ObjectError as error:
            assert str(error).startswith(f"{folder.url}/{name}: ")
            is_gone = "no such object" in str(error)
            assert not is_gone or None in before
            failed += not is_gone
            new = content if action in ("write", "upload") else None
            contents[name] = before | {new} if action in ("write", "upload", "delete") else before
        else:
            if action in ("write", "upload", "delete"):
                contents[name] = {None if action == "delete" else content}
        # Without faults: one of the complete contents, and after a success the last.
        server.faults = lambda request: None
        check(name)
    for name in contents:
        check(name)
    assert failed < 60


def test_a_kill_between_parts_leaves_the_object_as_it_was(
    folder: ObjectFolder, server: ObjectServer, tmp_path: Path
) -> None:
    folder.write("file", b"before")
    (tmp_path / "file").write_bytes(bytes(12 << 20))
    # The first part arrives, the others hang.
    server.faults = lambda request: "hang" if "partNumber=" in request and "partNumber=1&" not in request else None
    program = (
        "import sys; from pathlib import Path; from megafp8.utils import object_store as o; o.PART_BYTES = 5 << 20\n"
        f"o.ObjectFolder({folder.url!r}).upload(Path(sys.argv[1]), 'file')"
    )
    seen = len(server.requests)
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "file")], env=dict(os.environ))
    deadline = time.monotonic() + 20
    while sum("partNumber=" in each for each in server.requests[seen:]) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is None
    process.kill()
    process.wait()
    server.faults = lambda request: None
    assert folder.read("file") == b"before"


def test_urls_have_a_place_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGAFP8_CACHE", str(tmp_path))
    assert local_path("s3://bucket/run/1/") == tmp_path / "s3/bucket/run/1"
    assert local_path("runs/first") == Path("runs/first")
    assert url_of(tmp_path / "s3/bucket/run/1") == "s3://bucket/run/1"
    assert url_of(tmp_path / "blocks/1") is None and url_of("runs/first") is None and url_of(tmp_path / "s3") is None
    assert is_url("gs://b/x") and not is_url("file://x") and not is_url("s3/x")


@pytest.mark.parametrize(
    "url", ["s3:///name", "s3://bucket/a//b", "s3://bucket/../x", "s3://bucket/x?versionId=1", "az://bucket/a#b"]
)
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(ObjectError, match="expected SCHEME://BUCKET/NAME"):
        parse_url(url)


def test_credentials_in_a_url_are_refused_and_not_shown() -> None:
    with pytest.raises(ObjectError, match="do not belong in a URL") as caught:
        parse_url("s3://key:secret@bucket/name")
    assert "secret" not in str(caught.value)


def test_names_of_the_multi_storage_client_are_looked_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "msc.yaml"
    provider = "storage_provider: {type: s3, options: {base_path: bucket/data, endpoint_url: 'http://host:9000'}}"
    config.write_text(
        f"profiles:\n  mine:\n    {provider}\n  files:\n    storage_provider: {{type: file}}\n"
        f"  keys:\n    {provider}\n    credentials_provider: {{type: S3Credentials}}\n"
    )
    monkeypatch.setenv("MSC_CONFIG", str(config))
    parse_url.cache_clear()
    place = parse_url("msc://mine/corpus/a")
    assert (str(place), place.endpoint) == ("s3://bucket/data/corpus/a", "http://host:9000")
    for url, words in (
        ("msc://other/a", "no profile other"), ("msc://files/a", "the type of profile files is file"),
        ("msc://keys/a", "give credentials in the environment"),
    ):  # fmt: skip
        with pytest.raises(ObjectError, match=words):
            parse_url(url)
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "absent.yaml"))
    parse_url.cache_clear()
    with pytest.raises(ObjectError, match="absent.yaml does not exist; set MSC_CONFIG"):
        parse_url("msc://mine/corpus/a")


def test_flags_for_paths_refuse_urls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGAFP8_CACHE", str(tmp_path))
    with pytest.raises(argparse.ArgumentTypeError, match="s3://bucket/run is a URL, but this flag takes a path"):
        path_text("s3://bucket/run")
    assert place_argument("s3://bucket/run") == tmp_path / "s3/bucket/run" and place_argument("run") == Path("run")
    with pytest.raises(argparse.ArgumentTypeError, match="do not belong in a URL"):
        place_argument("s3://key:secret@bucket/run")


def test_a_forked_process_is_told_that_it_cannot(folder: ObjectFolder) -> None:
    folder.write("name", b"content")
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(ObjectError, match="forked"):
        pool.apply(ObjectFolder, (folder.url,))
