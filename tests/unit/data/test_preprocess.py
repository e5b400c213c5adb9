import dataclasses
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from megafp8.config.schema import DataConfig
from megafp8.data import preprocess as preprocess_module
from megafp8.data.atomic import file_sha256
from megafp8.data.manifest import load_manifest
from megafp8.data.preprocess import PreprocessJob, preprocess
from megafp8.data.readers import read_batches
from megafp8.data.shard_checks import check_shard
from megafp8.data.shards import read_index
from megafp8.data.tokenizer import build_tokenizer
from megafp8.errors import DataError

NULL = DataConfig(tokenizer_type="NullTokenizer")


@pytest.fixture
def job(tmp_path, corpus_file, tokenizer_config):
    return PreprocessJob(
        inputs=(str(corpus_file),),
        output_prefix=str(tmp_path / "out" / "c"),
        tokenizer=tokenizer_config,
        append_eod=True,
    )


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(preprocess_module, "read_batches", lambda path: read_batches(path, batch_bytes=500))


def shard_bytes(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".manifest.json")]


def null_job(tmp_path, lines, **options):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    return PreprocessJob(
        inputs=(str(path),), output_prefix=str(tmp_path / "n"), tokenizer=NULL, vocab_size=1000, **options
    )


def test_shard_holds_each_document_and_its_end(job, documents):
    summary = preprocess(job)
    ((prefix, manifest),) = summary.shards
    assert prefix == f"{job.output_prefix}_text_document"
    tokenizer = build_tokenizer(job.tokenizer)
    index = check_shard(prefix, tokenizer.vocab_size, tokenizer_identifiers=tokenizer.unique_identifiers)
    pieces = np.split(np.fromfile(f"{prefix}.bin", index.dtype), np.cumsum(index.sequence_lengths)[:-1])
    assert [tokenizer.detokenize(ids[:-1]) for ids in pieces] == documents
    assert all(ids[-1] == tokenizer.eod for ids in pieces)
    assert (manifest.num_documents, manifest.num_tokens) == (60, index.num_tokens)


def test_manifest_tells_the_truth(job, corpus_file):
    ((prefix, manifest),) = preprocess(job).shards
    assert load_manifest(prefix) == manifest
    assert manifest.bin_sha256 == file_sha256(f"{prefix}.bin")
    assert manifest.idx_sha256 == file_sha256(f"{prefix}.idx")
    assert manifest.bin_bytes == os.path.getsize(f"{prefix}.bin")
    assert manifest.idx_bytes == os.path.getsize(f"{prefix}.idx")
    assert manifest.sources[0]["sha256"] == file_sha256(corpus_file)
    assert manifest.tokenizer == dict(build_tokenizer(job.tokenizer).unique_identifiers)


def test_same_bytes_with_any_number_of_workers(job, tmp_path, small_batches):
    made = []
    for workers in (1, 2, 3):
        prefix = str(tmp_path / f"w{workers}" / "c")
        ((shard, _),) = preprocess(dataclasses.replace(job, output_prefix=prefix, workers=workers)).shards
        made.append(shard_bytes(shard))
    assert made[0] == made[1] == made[2]


def test_same_bytes_as_megatrons_pipeline(tmp_path):
    """One document a call, written through megatron-core's builder, as its preprocess_data.py does."""
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    texts = ["1 2 3", "", "4", "5 6", "  "]
    ((prefix, _),) = preprocess(null_job(tmp_path, texts, append_eod=True)).shards
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for text in texts:
        ids = [int(word) for word in text.split()]
        ids += [1000] if ids else []
        builder.add_document(ids, [len(ids)] if ids else [])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert Path(prefix + suffix).read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_gzip_and_several_files_and_keys(tmp_path, job, corpus_file):
    half = corpus_file.read_bytes().splitlines(keepends=True)
    (tmp_path / "1.jsonl").write_bytes(b"".join(half[:25]))
    (tmp_path / "2.jsonl.gz").write_bytes(gzip.compress(b"".join(half[25:])))
    split = dataclasses.replace(
        job,
        inputs=(str(tmp_path / "1.jsonl"), str(tmp_path / "2.jsonl.gz")),
        output_prefix=str(tmp_path / "split"),
        json_keys=("text", "title"),
    )
    ((whole, _),) = preprocess(job).shards
    (text, _), (title, title_manifest) = preprocess(split).shards
    assert shard_bytes(text)[:2] == shard_bytes(whole)[:2]
    assert title.endswith("split_title_document")
    assert title_manifest.num_documents == 60
    assert len(title_manifest.sources) == 2


def test_progress_reaches_the_size_of_the_input(job, small_batches, corpus_file):
    seen = []
    ((_, manifest),) = preprocess(job, on_progress=seen.append).shards
    assert len(seen) > 3
    assert seen[-1].input_bytes == corpus_file.stat().st_size
    assert (seen[-1].num_documents, seen[-1].num_tokens) == (60, manifest.num_tokens)


def test_again_does_nothing_until_overwrite(job):
    ((prefix, _),) = preprocess(job).shards
    before = os.stat(f"{prefix}.bin").st_ino
    again = preprocess(job)
    assert not again.made
    assert again.shards[0][0] == prefix
    assert os.stat(f"{prefix}.bin").st_ino == before
    assert preprocess(dataclasses.replace(job, overwrite=True)).made
    assert os.stat(f"{prefix}.bin").st_ino != before


def test_a_copy_of_the_same_text_is_the_same_text(job, tmp_path, corpus_file):
    preprocess(job)
    (tmp_path / "elsewhere.jsonl").write_bytes(corpus_file.read_bytes())
    assert not preprocess(dataclasses.replace(job, inputs=(str(tmp_path / "elsewhere.jsonl"),))).made


def test_anything_else_under_the_prefix_is_refused(job, tmp_path, corpus_file):
    ((prefix, _),) = preprocess(job).shards
    with pytest.raises(DataError, match="--append-eod"):
        preprocess(dataclasses.replace(job, append_eod=False))
    with pytest.raises(DataError, match="with the tokenizer"):
        preprocess(dataclasses.replace(job, tokenizer=NULL, vocab_size=5))
    with pytest.raises(DataError, match="1 input files, now 2"):
        preprocess(dataclasses.replace(job, inputs=job.inputs * 2))
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(corpus_file.read_bytes().replace(b"Doc 7", b"Doc 8"))
    with pytest.raises(DataError, match="changed.jsonl is not"):
        preprocess(dataclasses.replace(job, inputs=(str(changed),)))
    Path(f"{prefix}.bin").write_bytes(b"")
    with pytest.raises(DataError, match="is 0 bytes long"):
        preprocess(job)
    Path(f"{prefix}.manifest.json").unlink()
    with pytest.raises(DataError, match="without the manifest"):
        preprocess(job)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_document_stops_the_job_and_leaves_nothing(job, tmp_path, workers, small_batches):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n' * 300 + '{"txt": "x"}\n' + '{"text": "fine"}\n' * 300)
    with pytest.raises(DataError, match="bad.jsonl line 301"):
        preprocess(dataclasses.replace(job, inputs=(str(bad),), workers=workers))
    assert not list((tmp_path / "out").iterdir())


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    with pytest.raises(DataError, match="5000.*1001"):
        preprocess(null_job(tmp_path, ["1 2", "3 5000"]))
    with pytest.raises(DataError, match="-1 to"):
        preprocess(null_job(tmp_path, ["1 2", "3 -1"]))


def test_no_text_at_all_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no text"):
        preprocess(null_job(tmp_path, ["", " "]))


def test_a_killed_worker_is_an_error_not_a_hang(job, monkeypatch, small_batches):
    monkeypatch.setattr(preprocess_module, "encode_batch", _die)
    with pytest.raises(DataError, match="process died"):
        preprocess(dataclasses.replace(job, workers=2))
    assert not list(Path(job.output_prefix).parent.iterdir())


def _die(settings, batch):
    os._exit(9)


def test_wide_ids_are_four_bytes(tmp_path):
    job = dataclasses.replace(null_job(tmp_path, ["70000 1"]), vocab_size=100_000)
    ((prefix, manifest),) = preprocess(job).shards
    assert manifest.dtype == "int32"
    assert np.fromfile(f"{prefix}.bin", np.int32).tolist() == [70000, 1]
    assert read_index(prefix).dtype == np.int32
