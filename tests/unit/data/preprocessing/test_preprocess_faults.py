"""Invalid documents and failing machines: every fault is named, and completed work is not lost."""

import dataclasses
import errno
import gzip
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from shard_files import names_in, null_job, shard_bytes

from megafp8.data.preprocessing import part_files
from megafp8.data.preprocessing import preprocess as preprocess_module
from megafp8.data.preprocessing import workers as preprocess_work
from megafp8.data.preprocessing.assembly import skipped_path
from megafp8.data.preprocessing.part_files import PartFolder
from megafp8.data.preprocessing.preprocess import preprocess
from megafp8.errors import DataError
from megafp8.utils.files import file_sha256

# ---- invalid documents -----------------------------------------------------------------------------------------------


BAD = {"{": "not JSON", '{"txt": "1"}': "'text' is missing", '{"text": "1 5000"}': "token id 5000, but the vocabulary",
       '{"text": "1 -1"}': "token id -1", '{"text": "one"}': "NullTokenizer expects"}  # fmt: skip


@pytest.fixture(params=["jsonl", "jsonl.gz"])
def bad_job(request, tmp_path):
    """Six hundred lines, some blank. Every hundredth one, from the 51st on, is invalid for NullTokenizer."""
    lines = [f'{{"text": "{n}"}}' if n % 7 else "" for n in range(600)]
    for index, line in enumerate(BAD):
        lines[100 * index + 50] = line
    content = "\n".join(lines).encode()
    path = tmp_path / f"bad.{request.param}"
    path.write_bytes(gzip.compress(content) if request.param.endswith("gz") else content)
    return dataclasses.replace(null_job(tmp_path, []), inputs=(str(path),))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_document_stops_the_job(bad_job, workers, small_parts):
    with pytest.raises(DataError) as caught:
        preprocess(dataclasses.replace(bad_job, workers=workers))
    found = [(index, reason) for index, reason in enumerate(BAD.values()) if reason in str(caught.value)]
    ((index, _),) = found  # with two workers any of them may come first
    assert f"{bad_job.inputs[0]} line {100 * index + 51}: " in str(caught.value)
    assert "--on-bad-document skip" in str(caught.value)
    assert index == 0 or workers == 2


@pytest.mark.parametrize("workers", [1, 3])
def test_bad_documents_are_skipped_counted_and_listed(bad_job, workers, small_parts):
    skipping = dataclasses.replace(bad_job, workers=workers, skip_bad=True)
    ((prefix, manifest),) = preprocess(skipping).shards
    good = [n for n in range(600) if n % 7 and (n % 100 != 50 or n == 550)]
    assert np.fromfile(f"{prefix}.bin", np.uint16).tolist() == good
    assert manifest.num_documents == len(good)
    assert manifest.num_skipped == 5
    listed = [json.loads(line) for line in skipped_path(bad_job.output_prefix).read_text().splitlines()]
    assert [(entry["path"], entry["line"]) for entry in listed] == [
        (bad_job.inputs[0], 100 * index + 51) for index in range(5)
    ]
    assert all(reason in entry["reason"] for reason, entry in zip(BAD.values(), listed, strict=True))
    assert not preprocess(skipping).made
    with pytest.raises(DataError, match="with 5 records skipped"):
        preprocess(bad_job)


def test_skipped_documents_are_not_reused_without_the_flag(bad_job, small_parts, monkeypatch):
    """A job that skipped documents is killed, and restarted without the flag."""
    with monkeypatch.context() as patch:
        patch.setattr(preprocess_module._JobRun, "_publish", _interrupt)
        with pytest.raises(Interrupted):
            preprocess(dataclasses.replace(bad_job, skip_bad=True))
    with pytest.raises(DataError, match="line 51: it is not JSON"):
        preprocess(bad_job)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_cut_gzip_file(tmp_path, small_parts, workers):
    lines = [json.dumps({"text": str(n % 1000), "noise": os.urandom(20).hex()}) for n in range(3000)]
    content = gzip.compress("\n".join(lines).encode())
    job = null_job(tmp_path, [])
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(content[: len(content) // 2])
    job = dataclasses.replace(job, inputs=(str(path),), workers=workers)
    with pytest.raises(DataError, match=r"cut.jsonl.gz line 1\d\d\d: the rest of the file is damaged: Compressed file"):
        preprocess(job)
    ((prefix, manifest),) = preprocess(dataclasses.replace(job, skip_bad=True)).shards
    assert 1000 < manifest.num_documents < 2000
    assert np.fromfile(f"{prefix}.bin", np.uint16).tolist() == [n % 1000 for n in range(manifest.num_documents)]
    (entry,) = map(json.loads, skipped_path(job.output_prefix).read_text().splitlines())
    assert entry["line"] == manifest.num_documents + 1


def test_a_bad_document_is_omitted_from_all_shards(tmp_path):
    lines = [{"a": "1", "b": "2"}, {"a": "x", "b": "3"}, {"a": "4", "b": "y"}, {"a": "5", "b": "6"}]
    job = dataclasses.replace(null_job(tmp_path, []), json_keys=("a", "b"), skip_bad=True)
    Path(job.inputs[0]).write_text("".join(json.dumps(line) + "\n" for line in lines))
    shards = preprocess(job).shards
    assert [np.fromfile(f"{prefix}.bin", np.uint16).tolist() for prefix, _ in shards] == [[1, 5], [2, 6]]
    assert [manifest.num_skipped for _, manifest in shards] == [2, 2]


def test_no_text_at_all_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no text: 1 files, 0 tokens"):
        preprocess(null_job(tmp_path, ["", " "]))
    job = dataclasses.replace(null_job(tmp_path, []), skip_bad=True)
    Path(job.inputs[0]).write_text("x\ny\n")
    with pytest.raises(DataError, match="2 records skipped"):
        preprocess(job)


# ---- the machine ----------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """The simulated end of a run."""


def _interrupt(*_):
    raise Interrupted


def test_a_killed_worker_is_an_error_not_a_hang(job, monkeypatch, small_parts):
    monkeypatch.setattr(preprocess_work, "_encode_part", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(DataError, match="process died: signal SIGKILL.*fewer --workers than 2"):
        preprocess(dataclasses.replace(job, workers=2))
    assert not list(Path(job.output_prefix).parent.iterdir())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_error_and_the_job_resumes(job, shard, monkeypatch, small_parts, workers):
    real = part_files.PartWriter.add

    def fill_up(writer, shards):
        if writer._name > "000003":
            raise OSError(28, "No space left on device")
        real(writer, shards)

    job = dataclasses.replace(job, workers=workers)
    with monkeypatch.context() as patch:
        patch.setattr(part_files.PartWriter, "add", fill_up)
        with pytest.raises(OSError, match="No space left on device"):
            preprocess(job)
    assert names_in(Path(job.output_prefix).parent) == ["c.parts"]
    seen = []
    ((prefix, _),) = preprocess(job, on_progress=seen.append).shards
    assert seen[0].num_documents > 0, "it did not resume"
    assert shard_bytes(prefix) == shard_bytes(shard)


@pytest.mark.parametrize("suffix", ["0.bin", "0.lengths", "json"])
def test_an_incomplete_part_is_rebuilt(job, shard, monkeypatch, small_parts, suffix):
    """After a crash of the machine, a file may be shorter than what was written."""
    with monkeypatch.context() as patch:
        patch.setattr(preprocess_module._JobRun, "_publish", _interrupt)
        with pytest.raises(Interrupted):
            preprocess(job)
    path = Path(f"{job.output_prefix}.parts/000002.{suffix}")
    path.write_bytes(path.read_bytes()[:-2])
    seen = []
    ((prefix, _),) = preprocess(job, on_progress=seen.append).shards
    assert len(seen) == 2
    assert shard_bytes(prefix) == shard_bytes(shard)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
@pytest.mark.parametrize("damaged", ["0.bin", "0.lengths", "skipped"])
def test_a_damaged_part_is_named_and_made_again(tmp_path, monkeypatch, small_parts, damaged, suffix):
    """After a crash of the machine, or with a bad disk, a file may have its size and other bytes."""
    lines = "\n".join(f'{{"text": "{n}"}}' if n % 50 else "{" for n in range(1000)).encode()
    path = tmp_path / f"c.{suffix}"
    path.write_bytes(gzip.compress(lines, 0) if suffix.endswith("gz") else lines)
    job = dataclasses.replace(null_job(tmp_path, []), inputs=(str(path),), skip_bad=True)
    whole = shard_bytes(preprocess(job).shards[0][0]), skipped_path(job.output_prefix).read_text()
    with monkeypatch.context() as patch:
        patch.setattr(preprocess_module._JobRun, "_publish", _interrupt)
        with pytest.raises(Interrupted):
            preprocess(dataclasses.replace(job, overwrite=True))
    folder = Path(f"{job.output_prefix}.parts")
    name = sorted(folder.glob("0*.json"))[2].stem
    content = bytearray((folder / f"{name}.{damaged}").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / f"{name}.{damaged}").write_bytes(content)
    messages = []
    ((prefix, _),) = preprocess(dataclasses.replace(job, overwrite=True), on_message=messages.append).shards
    assert f"made again, because damaged or of an earlier version in {folder}: 1 part ({name})" in messages
    assert messages[0] == f"reading the finished parts in {folder}, to compare their SHA-256"
    assert (shard_bytes(prefix), skipped_path(job.output_prefix).read_text()) == whole


def test_a_part_is_on_the_disk_before_its_record(job, monkeypatch, small_parts):
    synced, real = [], os.fsync

    def fsync(descriptor):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    preprocess(job)
    first = [name for name in synced if "000000" in name]
    assert first[:2] == ["000000.0.bin", "000000.0.lengths"]
    assert first[2].startswith(".000000.json.")


@pytest.mark.parametrize("kernel", ["refuses", "copies nothing", "stops in the middle"])
def test_parts_are_joined_without_kernel_copy(job, shard, monkeypatch, small_parts, kernel):
    real = os.copy_file_range

    def copy(source, target, count, offset):
        if kernel == "stops in the middle" and offset == 0:
            return real(source, target, count // 2, offset)
        if kernel == "refuses":
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return 0

    monkeypatch.setattr(os, "copy_file_range", copy)
    ((prefix, manifest),) = preprocess(job).shards
    assert shard_bytes(prefix) == shard_bytes(shard)
    assert manifest.bin_sha256 == file_sha256(f"{prefix}.bin")


def test_a_disk_that_fills_up_while_parts_are_joined(job, shard, monkeypatch, small_parts):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "copy_file_range", refuse)
        patch.setattr(os, "write", refuse)
        with pytest.raises(OSError, match="No space left"):
            preprocess(job)
    assert shard_bytes(preprocess(job).shards[0][0]) == shard_bytes(shard)


def test_a_folder_that_cannot_be_written(job, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        preprocess(dataclasses.replace(job, output_prefix=str(tmp_path / "file" / "c")))


def test_two_jobs_with_one_prefix(job, monkeypatch, tmp_path):
    monkeypatch.setattr(part_files, "LOCK_PATIENCE_S", 0.2)
    folder = PartFolder(job.output_prefix, 1, np.dtype(np.uint16))
    with folder.lock(), pytest.raises(DataError, match="Another job is writing to .*c.parts"):
        preprocess(job)


def test_an_unfinished_other_job_is_not_touched(job, monkeypatch, small_parts):
    with monkeypatch.context() as patch:
        patch.setattr(preprocess_module._JobRun, "_publish", _interrupt)
        with pytest.raises(Interrupted):
            preprocess(job)
    with pytest.raises(DataError, match="c.parts has an unfinished job with different append eod"):
        preprocess(dataclasses.replace(job, append_eod=False))
    # --overwrite drops it, but resumes its own.
    messages, seen = [], []
    with monkeypatch.context() as patch:
        patch.setattr(preprocess_module._JobRun, "_publish", _interrupt)
        with pytest.raises(Interrupted):
            preprocess(dataclasses.replace(job, append_eod=False, overwrite=True), on_progress=seen.append)
    assert seen[0].num_documents == 0
    seen.clear()
    preprocess(dataclasses.replace(job, append_eod=False, overwrite=True), seen.append, messages.append)
    assert (len(seen), seen[0].num_documents) == (1, 60)
