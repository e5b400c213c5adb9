import json

import pytest

from megafp8.data.preprocessing.corpus import find_modules, stdlib_folder, write_stdlib_corpus
from megafp8.errors import DataError


@pytest.fixture
def library(tmp_path):
    folder = tmp_path / "lib"
    files = {
        "a.py": b"x = 1\n",
        "b/c.py": b"'''Doc.'''\r\ny = 2\r\n",
        "b/latin.py": "# gr\u00fcn".encode("latin-1"),
        "empty.py": b" \n",
        "test/t.py": b"no",
        "site-packages/p.py": b"no",
        "encodings/e.py": b"no",
        "b/note.txt": b"no",
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def read(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_only_readable_modules_are_used(library, tmp_path):
    summary = write_stdlib_corpus(tmp_path / "out.jsonl", folder=library)
    documents = {document["source"]: document["text"] for document in read(summary.path)}
    assert documents == {"a.py": "x = 1\n", "b/c.py": "'''Doc.'''\ny = 2\n"}
    assert summary.num_documents == 2
    assert summary.text_bytes == sum(map(len, documents.values()))


def test_same_order_every_time_another_with_another_seed(tmp_path):
    folder = tmp_path / "lib"
    folder.mkdir()
    for n in range(30):
        (folder / f"m{n:02}.py").write_text(f"x = {n}\n")
    first = read(write_stdlib_corpus(tmp_path / "1.jsonl", folder=folder, seed=1).path)
    again = read(write_stdlib_corpus(tmp_path / "2.jsonl", folder=folder, seed=1).path)
    other = read(write_stdlib_corpus(tmp_path / "3.jsonl", folder=folder, seed=2).path)
    assert first == again
    assert first != other
    assert first != sorted(first, key=lambda document: document["source"])

    (folder / "new.py").write_text("z = 1\n")
    grown = read(write_stdlib_corpus(tmp_path / "4.jsonl", folder=folder, seed=1).path)
    assert [document for document in grown if document["source"] != "new.py"] == first


def test_max_bytes_bounds_the_text(tmp_path):
    folder = tmp_path / "lib"
    folder.mkdir()
    for n in range(10):
        (folder / f"m{n}.py").write_text("#" * 99 + "\n")
    assert write_stdlib_corpus(tmp_path / "c.jsonl", folder=folder, max_bytes=350).num_documents == 3


def test_unchanged_file_keeps_its_modification_time(library, tmp_path):
    path = tmp_path / "out.jsonl"
    assert write_stdlib_corpus(path, folder=library).changed
    before = path.stat().st_mtime_ns
    assert not write_stdlib_corpus(path, folder=library).changed
    assert path.stat().st_mtime_ns == before
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["out.jsonl"]


def test_nothing_found_is_an_error_and_leaves_nothing(tmp_path):
    (tmp_path / "lib").mkdir()
    with pytest.raises(DataError, match="--max-bytes"):
        write_stdlib_corpus(tmp_path / "out.jsonl", folder=tmp_path / "lib")
    assert not list(tmp_path.glob("*out*"))


def test_this_machine_has_a_corpus():
    modules = [path.as_posix() for path in find_modules(stdlib_folder())]
    assert "json/decoder.py" in modules
    assert not [path for path in modules if "site-packages" in path or path.startswith("test/")]
    assert len(modules) > 300
