"""The cache of indices: broken entries are rebuilt, intact ones are kept, and no code in it ever runs."""

import json
import multiprocessing
import os
import pickle
import time

import hostile_files
import numpy as np
import pytest

from megafp8.data.index_cache import CorruptEntryError, IndexCache, array_path, entry_name, load_entry, save_entry
from megafp8.errors import DataError

CONTENT = {"kind": "test", "seed": 1}
NAME = entry_name(CONTENT)


def arrays():
    return {"first": np.arange(1000, dtype=np.int32), "second": np.arange(6, dtype=np.int64).reshape(3, 2)}


def refuse_to_build():
    raise AssertionError("it is in the cache")


def open_cache(folder):
    """The arrays, and the messages about building them."""
    told = []
    found = IndexCache(folder, on_build=told.append).load_or_build("the test", CONTENT, arrays)
    for name, values in arrays().items():
        assert np.array_equal(found[name], values) and found[name].dtype == values.dtype
    return found, told


def test_a_built_index_is_loaded(tmp_path):
    _, told = open_cache(tmp_path / "new" / "folder")
    assert told == ["the test"]
    found = IndexCache(tmp_path / "new" / "folder").load_or_build("the test", CONTENT, refuse_to_build)
    assert np.array_equal(found["first"], np.arange(1000))
    assert not found["first"].flags.writeable
    assert type(found["first"]) is np.ndarray


def test_without_a_folder_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert IndexCache(None).load_or_build("the test", CONTENT, arrays)["first"].flags.writeable
    assert list(tmp_path.iterdir()) == []


def test_other_content_is_another_entry(tmp_path):
    open_cache(tmp_path)
    other = {**CONTENT, "seed": 2}
    found = IndexCache(tmp_path).load_or_build("other", other, lambda: {"first": np.zeros(3)})
    assert len(found["first"]) == 3
    assert len(open_cache(tmp_path)[0]["first"]) == 1000


def flip(offset, mask=1):
    def apply(path):
        content = bytearray(path.read_bytes())
        content[offset] ^= mask
        path.write_bytes(content)

    return apply


def cut(length):
    return lambda path: path.write_bytes(path.read_bytes()[:length])


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


DAMAGE = {
    "empty": cut(0),
    "cut in the header": cut(20),
    "cut in the data": cut(2000),
    "without its last byte": cut(-1),
    "flipped in the magic": flip(1),
    "flipped in the dtype": flip(22, 6),
    "flipped in the data": flip(1000),
    "flipped at the end": flip(-1, 128),
    "another array": lambda path: np.save(path, np.arange(999, dtype=np.int32)),
    "another dtype": lambda path: np.save(path, np.arange(1000, dtype=np.uint32)),
    "transposed": lambda path: np.save(path, np.arange(1000, dtype=np.int32).reshape(500, 2).T),
    "objects": lambda path: np.save(path, np.array([Payload("x")]), allow_pickle=True),
    "a zip of arrays": lambda path: np.savez(path.open("wb"), first=np.arange(1000, dtype=np.int32)),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_broken_array_is_rebuilt_once(tmp_path, damage):
    open_cache(tmp_path)
    damage(array_path(tmp_path, NAME, "first"))
    with pytest.raises(CorruptEntryError):
        load_entry(tmp_path, NAME)
    _, told = open_cache(tmp_path)
    assert len(told) == 1 and told[0].startswith("the test again: ")
    assert open_cache(tmp_path)[1] == []


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"{}", b'{"arrays": 1}', b'{"arrays": {"first": {}}}', b"\xff\xfe"]
)
def test_a_broken_description_is_written_again(tmp_path, text):
    open_cache(tmp_path)
    (tmp_path / f"{NAME}.json").write_bytes(text)
    assert len(open_cache(tmp_path)[1]) == 1
    assert open_cache(tmp_path)[1] == []


@pytest.mark.parametrize("hostile", ["fifo", "deep lists", "long integer"])
@pytest.mark.parametrize("part", ["description", "array"])
def test_a_hostile_file_is_replaced(tmp_path, part, hostile):
    open_cache(tmp_path)
    path = tmp_path / f"{NAME}.json" if part == "description" else array_path(tmp_path, NAME, "second")
    path.unlink()
    if hostile == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(hostile_files.JSON[hostile])
    _, (told,) = open_cache(tmp_path)
    assert told.startswith("the test again: ") and ("a named pipe" in told or hostile != "fifo")
    assert open_cache(tmp_path)[1] == []


def test_arrays_without_a_description_are_an_unfinished_entry(tmp_path):
    """The leftovers of a job that was killed while it wrote."""
    open_cache(tmp_path)
    (tmp_path / f"{NAME}.json").unlink()
    cut(50)(array_path(tmp_path, NAME, "second"))
    assert open_cache(tmp_path)[1] == ["the test"]


@pytest.mark.parametrize("name", [f"{NAME}-first.npy", f"{NAME}-second.npy", f"{NAME}.json"])
def test_a_pickle_is_never_loaded(tmp_path, name):
    open_cache(tmp_path / "cache")
    (tmp_path / "cache" / name).write_bytes(pickle.dumps(Payload(tmp_path / "was run")))
    assert len(open_cache(tmp_path / "cache")[1]) == 1
    assert not (tmp_path / "was run").exists()


def test_a_cache_that_cannot_be_written_is_read(tmp_path, monkeypatch):
    open_cache(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr("megafp8.data.index_cache.atomic_write", refuse_to_build)
    assert open_cache(tmp_path)[1] == []
    other = {**CONTENT, "seed": 2}
    with pytest.raises(
        DataError, match=r"cannot be written: Permission denied.*--data-cache-path.*megafp8 build-index"
    ):
        IndexCache(tmp_path).load_or_build("other", other, refuse_to_build)


def test_a_build_error_is_not_reported_as_a_folder_error(tmp_path):
    def build():
        raise FileNotFoundError("the shard is gone")

    with pytest.raises(FileNotFoundError, match="the shard is gone"):
        IndexCache(tmp_path).load_or_build("the test", CONTENT, build)


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="Not a directory"):
        IndexCache(tmp_path / "file" / "cache").load_or_build("the test", CONTENT, refuse_to_build)


def test_a_full_disk_is_an_error_and_leaves_no_entry(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(DataError, match="No space left on device"):
        IndexCache(tmp_path).load_or_build("the test", CONTENT, arrays)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_corrupts_writes_is_an_error(tmp_path, monkeypatch):
    def save_and_damage(folder, name, content, built):
        save_entry(folder, name, content, built)
        flip(-1)(array_path(folder, name, "first"))

    monkeypatch.setattr("megafp8.data.index_cache.save_entry", save_and_damage)
    with pytest.raises(DataError, match="loses written data.*different content"):
        IndexCache(tmp_path).load_or_build("the test", CONTENT, arrays)


def build_slowly(folder, start, results):
    """One of several jobs: waits for the others, builds or loads, and returns its arrays."""

    def slow():
        time.sleep(0.05)
        return {"first": np.arange(200_000, dtype=np.int64), "second": np.arange(3)}

    start.wait()
    found = IndexCache(folder).load_or_build("the test", CONTENT, slow)
    results.put((int(found["first"].sum()), found["second"].tolist()))


@pytest.mark.parametrize("is_broken", [False, True])
def test_jobs_that_build_one_entry_at_once(tmp_path, is_broken):
    context = multiprocessing.get_context("fork")
    if is_broken:
        save_entry(tmp_path, NAME, CONTENT, {"first": np.arange(9)})
        cut(30)(array_path(tmp_path, NAME, "first"))
    start, results = context.Barrier(4), context.Queue()
    jobs = [context.Process(target=build_slowly, args=(tmp_path, start, results)) for _ in range(4)]
    for job in jobs:
        job.start()
    assert [results.get(timeout=30) for _ in jobs] == [(199_999 * 100_000, [0, 1, 2])] * 4
    for job in jobs:
        job.join()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{NAME}.json", f"{NAME}-first.npy", f"{NAME}-second.npy"}, "nothing temporary is left"
    assert json.loads((tmp_path / f"{NAME}.json").read_text())["content"] == CONTENT


def test_hashes_are_compared_by_one_process_of_a_machine(tmp_path, monkeypatch):
    """The others map the arrays, and compare dtypes and shapes only."""
    open_cache(tmp_path)
    unchecked = IndexCache(tmp_path, is_checked=False)
    monkeypatch.setattr("megafp8.data.index_cache.hashlib.sha256", None)
    monkeypatch.setattr("megafp8.data.index_cache.entry_name", lambda content: NAME)
    assert len(unchecked.load_or_build("the test", CONTENT, refuse_to_build)["first"]) == 1000
    cut(2000)(array_path(tmp_path, NAME, "first"))
    with pytest.raises(AssertionError, match="in the cache"):
        unchecked.load_or_build("the test", CONTENT, refuse_to_build)
