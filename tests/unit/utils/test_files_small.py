"""Small files: valid ones are read, and anything else is one named error, immediately."""

from __future__ import annotations

import os
import re
import threading
import tracemalloc
from pathlib import Path

import hostile_files
import pytest

from megafp8.utils.files import LIST_BYTES, MAX_BYTES, UnreadableFile, open_regular, read_bytes, read_text
from megafp8.utils.strict_json import parse_json, read_json
from megafp8.utils.strict_yaml import compose_yaml, key_lines, parse_yaml, read_yaml


@pytest.mark.parametrize("read", [read_json, read_yaml, read_text])
@pytest.mark.parametrize("kind", hostile_files.KINDS)
def test_files_of_other_kinds(kind: str, read, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file"
    hostile_files.KINDS[kind](path)
    with pytest.raises(UnreadableFile) as caught:
        read(path)
    assert caught.value.path == path and not caught.value.is_missing
    assert str(caught.value) == f"{path}: {caught.value.reason}"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("fifo", "it is a named pipe, not a regular file"),
        ("socket", "it is a socket, not a regular file"),
        ("directory", "it is a directory, not a regular file"),
        ("endless device", "it is a device, not a regular file"),
        ("link to itself", "Too many levels of symbolic links"),
        ("too large", f"it has more than {MAX_BYTES:,} bytes"),
    ],
)
def test_the_reason_names_the_kind(kind: str, reason: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    hostile_files.KINDS[kind](tmp_path / "file")
    with pytest.raises(UnreadableFile) as caught:
        read_bytes(tmp_path / "file")
    assert caught.value.reason == reason


def test_a_pipe_with_a_writer_is_refused_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: os.close(os.open(tmp_path / "pipe", os.O_RDWR)))
    writer.start()
    with pytest.raises(UnreadableFile, match="a named pipe"):
        open_regular(tmp_path / "pipe")
    writer.join()


@pytest.mark.parametrize("name", ["absent", "absent/file", "x" * 300, "x\0y", "\ud800"])
def test_a_missing_file_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableFile) as caught:
        read_bytes(f"{tmp_path}/{name}")
    assert caught.value.is_missing and caught.value.reason


def test_a_link_to_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a": [1, 2.5, null, "\\ud83d\\ude00"]}')
    (tmp_path / "link").symlink_to("file")
    assert read_json(tmp_path / "link") == {"a": [1, 2.5, None, "😀"]}


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "file") == read_yaml(tmp_path / "file") == {"a": 1}


def test_the_limit_itself_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    assert read_bytes(tmp_path / "file", 4) == b"1234"
    with pytest.raises(UnreadableFile, match="more than 3 bytes"):
        read_bytes(tmp_path / "file", 3)


def test_a_small_file_takes_little_memory_under_a_high_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    tracemalloc.start()
    try:
        assert read_bytes(tmp_path / "file", LIST_BYTES) == b"1234"
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES // 16
    finally:
        tracemalloc.stop()


def test_a_file_without_a_size_is_read() -> None:
    assert os.stat("/proc/self/status").st_size == 0
    assert read_bytes("/proc/self/status").endswith(b"\n")


@pytest.mark.parametrize("content", hostile_files.JSON)
def test_hostile_json(content: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(hostile_files.JSON[content])
    with pytest.raises(UnreadableFile) as caught:
        read_json(tmp_path / "file")
    assert caught.value.path == tmp_path / "file" and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("content", "as_written"),
    # As text, scalars have any tag.
    [(name, way) for name in hostile_files.YAML for way in (False, True) if not (way and re.search("deep|tag", name))],
)
def test_hostile_yaml(content: str, as_written: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(hostile_files.YAML[content])
    with pytest.raises(UnreadableFile) as caught:
        read_yaml(tmp_path / "file", as_written=as_written)
    assert caught.value.path == tmp_path / "file"


@pytest.mark.parametrize("content", hostile_files.YAML_NUMBERS)
def test_hostile_numbers_of_yaml(content: str) -> None:
    text = hostile_files.YAML_NUMBERS[content].decode()
    with pytest.raises(UnreadableFile):
        parse_yaml(text)
    parse_yaml(text, as_written=True)


def test_numbers_of_json() -> None:
    assert parse_json("1" + "0" * 30) == 10**30 and parse_json("-1.25e-300") == -1.25e-300


def test_an_anchor_that_holds_itself_ends() -> None:
    assert key_lines("a: &a {b: *a}\n") == {("a",): 1, ("a", "b"): 1}


def test_yaml_has_aliases_and_merged_keys() -> None:
    text = "a: &a {x: 1, y: 2:00:00}\nb: {<<: *a, x: true}\nc: [*a, *a]\n"
    expected = {"x": 1, "y": 7200}
    assert parse_yaml(text) == {"a": expected, "b": expected | {"x": True}, "c": [expected, expected]}
    assert parse_yaml("time: 24:00:00\non: on\n", as_written=True) == {"time": "24:00:00", "on": "on"}
    assert parse_yaml("") is None and compose_yaml("# nothing") is None
