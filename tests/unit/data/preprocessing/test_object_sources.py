"""Text in object storage is copied to the cache and read from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from object_server import ObjectServer, object_server

from megafp8.data.preprocessing.sources import find_sources
from megafp8.errors import DataError
from megafp8.utils import object_store
from megafp8.utils.object_store import ObjectFolder, RetryPolicy


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectServer]:
    monkeypatch.setattr(object_store, "POLICY", RetryPolicy(2, 0.005, 10.0, 1))
    monkeypatch.setenv("MEGAFP8_CACHE", str(tmp_path / "cache"))
    with object_server() as running:
        running.make_bucket("bucket")
        yield running


def test_objects_folders_and_patterns_are_inputs(server: ObjectServer, tmp_path: Path) -> None:
    folder = ObjectFolder("s3://bucket/text")
    for name in ("b.jsonl", "a/a.jsonl.gz", "tokenizer.json", "notes.md"):
        folder.write(name, name.encode())

    def names(url: str) -> list[str]:
        return [path.removeprefix(f"{tmp_path}/cache/s3/bucket/text/") for path in paths(url)]

    def paths(url: str) -> list[str]:
        return [source.path for source in find_sources([url])]

    assert names("s3://bucket/text") == ["a/a.jsonl.gz", "b.jsonl"]
    assert names("s3://bucket/text/b.jsonl") == ["b.jsonl"]
    assert names("s3://bucket/text/a/*.gz") == names("s3://bucket/text/*.gz") == ["a/a.jsonl.gz"]
    first = find_sources(["s3://bucket/text"])
    seen = [request for request in server.requests if request.startswith("GET") and "jsonl" in request]
    assert find_sources(["s3://bucket/text"]) == first and first[0].mtime_ns > 0
    assert [request for request in server.requests if request.startswith("GET") and "jsonl" in request] == seen


def test_errors_name_the_input(server: ObjectServer) -> None:
    with pytest.raises(DataError, match="--input s3://bucket/absent: no such file"):
        find_sources(["s3://bucket/absent"])
    with pytest.raises(DataError, match="--input s3://other/a.jsonl: no such bucket"):
        find_sources(["s3://other/a.jsonl"])
