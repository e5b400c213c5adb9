"""Text to shards: the same bytes for any number of workers, kind of file and encoder."""

import dataclasses
import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from shard_files import NULL, names_in, null_job, shard_bytes

from megafp8.config.schema import DataConfig
from megafp8.data.preprocessing import preprocess as preprocess_module
from megafp8.data.preprocessing.plan import InputPart, Stream, build_tasks, choose_part_bytes, divide
from megafp8.data.preprocessing.preprocess import preprocess
from megafp8.data.preprocessing.sources import find_sources
from megafp8.data.shard_verification import check_shard
from megafp8.data.shards import load_manifest, read_index
from megafp8.data.tokenizers import encoders
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.errors import CapabilityError, DataError
from megafp8.utils.files import file_sha256

# ---- output ----------------------------------------------------------------------------------------------------------


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
    assert names_in(Path(prefix).parent) == [f"c_text_document{end}" for end in (".bin", ".idx", ".manifest.json")]


def test_manifest_matches_the_shard(job, corpus_file):
    ((prefix, manifest),) = preprocess(job).shards
    assert load_manifest(prefix) == manifest
    assert manifest.bin_sha256 == file_sha256(f"{prefix}.bin")
    assert manifest.idx_sha256 == file_sha256(f"{prefix}.idx")
    assert manifest.bin_bytes == os.path.getsize(f"{prefix}.bin")
    assert manifest.idx_bytes == os.path.getsize(f"{prefix}.idx")
    status = corpus_file.stat()
    assert manifest.sources == [{"path": str(corpus_file), "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}]
    assert manifest.tokenizer == dict(build_tokenizer(job.tokenizer).unique_identifiers)
    assert (manifest.encoder, manifest.num_skipped) == ("SentencePieceTokenizer's own library", 0)


@pytest.mark.parametrize("encoder", ["library", "gigatoken"])
def test_same_bytes_with_any_number_of_workers(job, shard, tmp_path, small_parts, encoder):
    if encoder == "gigatoken":
        pytest.importorskip("gigatoken")
    whole = shard_bytes(shard)  # it was built in one part
    for workers in (1, 2, 5):
        prefix = str(tmp_path / f"w{workers}" / "c")
        divided = dataclasses.replace(job, output_prefix=prefix, workers=workers, encoder=encoder)
        messages = []
        ((shard, manifest),) = preprocess(divided, on_message=messages.append).shards
        assert shard_bytes(shard) == whole
        assert manifest.encoder.startswith({"library": "SentencePiece", "gigatoken": "gigatoken"}[encoder])
        assert manifest.encoder in messages[0]


def test_same_bytes_as_megatrons_pipeline(tmp_path, small_parts):
    """One document per call, written through megatron-core's builder, as its preprocess_data.py does."""
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    texts = ["1 2 3", "", "4", "5 6", "  ", *(" ".join(map(str, range(n))) for n in range(300))]
    for append_eod in (False, True):
        ((prefix, _),) = preprocess(null_job(tmp_path, texts, append_eod=append_eod, overwrite=True, workers=2)).shards
        builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
        for text in texts:
            ids = [int(word) for word in text.split()]
            ids += [1000] if ids and append_eod else []
            builder.add_document(ids, [len(ids)] if ids else [])
        builder.finalize(str(tmp_path / "theirs.idx"))
        assert shard_bytes(prefix) == shard_bytes(tmp_path / "theirs")


def test_the_kinds_of_files_give_the_same_shard(tmp_path, job, shard, corpus_file, documents, small_parts):
    pyarrow = pytest.importorskip("pyarrow")
    zstd = pytest.importorskip("backports.zstd")
    from pyarrow import parquet

    whole = shard_bytes(preprocess(job).shards[0][0])
    lines = corpus_file.read_bytes()
    table = pyarrow.table({"id": range(60), "text": documents})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=9)
    content = {
        "a.json": lines, "a.jsonl.gz": gzip.compress(lines), "a.ndjson.zst": zstd.compress(lines),
        "a.txt": "<|end|>".join(documents).encode(), "a.txt.gz": gzip.compress("<|end|>".join(documents).encode()),
    }  # fmt: skip
    for name in (*content, "a.parquet"):
        if name in content:
            (tmp_path / name).write_bytes(content[name])
        for workers in (1, 3):
            other = dataclasses.replace(
                job, inputs=(str(tmp_path / name),), output_prefix=str(tmp_path / f"{name}{workers}"), workers=workers,
                text_separator="<|end|>",
            )  # fmt: skip
            assert shard_bytes(preprocess(other).shards[0][0]) == whole, (name, workers)


def test_many_small_files_are_one_shard_in_order(tmp_path, job, shard, documents, small_parts):
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(documents):
        (tmp_path / "texts" / f"{number:03}.txt").write_bytes(text.encode())
    job = dataclasses.replace(job, inputs=(str(tmp_path / "texts"),), output_prefix=str(tmp_path / "t"), workers=2)
    assert shard_bytes(preprocess(job).shards[0][0]) == shard_bytes(shard)


def test_a_tokenizer_that_loses_text_is_said(tmp_path, job, documents):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.BPE({"e": 0, "</s>": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    one_letter = DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    warnings = []
    for tokenizer in (one_letter, job.tokenizer):
        messages = []
        preprocess(dataclasses.replace(job, tokenizer=tokenizer, overwrite=True), on_message=messages.append)
        warnings.append([message for message in messages if "loses" in message])
    letters = "".join("".join(documents[:16]).split())
    lost = 1 - letters.count("e") / len(letters)
    assert warnings == [
        [
            f"warning: the tokenizer loses {lost:.1%} of the characters of a sample of the text: decoding its ids does "
            "not return them"
        ],
        [],
    ]


def test_several_keys(job, shard, small_parts):
    job = dataclasses.replace(job, json_keys=("title", "text"), output_prefix=f"{job.output_prefix}2", workers=2)
    (title, title_manifest), (text, _) = preprocess(job).shards
    assert shard_bytes(text) == shard_bytes(shard)
    assert title.endswith("c2_title_document")
    tokenizer, index = build_tokenizer(job.tokenizer), read_index(title)
    pieces = np.split(np.fromfile(f"{title}.bin", index.dtype), np.cumsum(index.sequence_lengths)[:-1])
    assert [tokenizer.detokenize(ids[:-1]) for ids in pieces] == [f"title {n}" for n in range(60)]


def test_wide_ids_are_four_bytes(tmp_path):
    job = dataclasses.replace(null_job(tmp_path, ["70000 1"]), vocab_size=100_000)
    ((prefix, manifest),) = preprocess(job).shards
    assert manifest.dtype == "int32"
    assert np.fromfile(f"{prefix}.bin", np.int32).tolist() == [70000, 1]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_progress_reaches_the_size_of_the_input(job, small_parts, corpus_file, tmp_path, name):
    lines = corpus_file.read_bytes()
    path = tmp_path / name
    path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    seen = []
    ((_, manifest),) = preprocess(dataclasses.replace(job, inputs=(str(path),)), on_progress=seen.append).shards
    assert len(seen) > 3
    assert (seen[0].input_bytes, seen[0].num_documents) == (0, 0)
    assert seen[-1].input_bytes == seen[-1].total_bytes == path.stat().st_size
    assert (seen[-1].num_documents, seen[-1].num_tokens) == (60, manifest.num_tokens)


# ---- division of the input
# --------------------------------------------------------------------------------------------


def test_part_sizes():
    assert choose_part_bytes(1 << 40, 8 << 20) == 1 << 28  # 4096 parts
    assert choose_part_bytes(1 << 30, 8 << 20) == 8 << 20
    assert choose_part_bytes(40 << 20, 8 << 20) == 5 << 20  # 8 parts
    assert choose_part_bytes(100, 8 << 20) == 1 << 20


def test_small_files_are_grouped_and_large_ones_split(tmp_path):
    sizes = {"a.jsonl": 10, "b.jsonl": 20, "c.jsonl": 250, "d.jsonl.gz": 10, "e.jsonl.gz": 90, "f.txt": 300}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    units = divide(find_sources([str(tmp_path)]), ("text",), 100)
    shown = [
        [(piece.source, piece.start, piece.stop) for piece in unit.pieces]
        if isinstance(unit, InputPart)
        else unit.source
        for unit in units
    ]
    assert shown == [
        [(0, 0, 10), (1, 0, 20), (2, 0, 100)], [(2, 100, 200)], [(2, 200, 250), (3, 0, 10)], 4, [(5, 0, 300)],
    ]  # fmt: skip
    assert sum(piece.input_bytes for unit in units if isinstance(unit, InputPart) for piece in unit.pieces) == 590
    names = [unit.name for unit in units]
    assert names == sorted(set(names))
    tasks = build_tasks(units, 3)
    assert [(task.number, task.count) for task in tasks[:3]] == [(0, 3), (1, 3), (2, 3)]
    assert tasks[3:] == [unit for unit in units if not isinstance(unit, Stream)]


# ---- repeated runs
# ----------------------------------------------------------------------------------------------------


def test_a_second_run_does_nothing_without_overwrite(job):
    ((prefix, _),) = preprocess(job).shards
    before = os.stat(f"{prefix}.bin").st_ino
    again = preprocess(job)
    assert not again.made
    assert again.shards[0][0] == prefix
    assert os.stat(f"{prefix}.bin").st_ino == before
    assert preprocess(dataclasses.replace(job, overwrite=True)).made
    assert os.stat(f"{prefix}.bin").st_ino != before


def test_leftovers_of_a_killed_run_are_removed(job):
    """It was killed while it deleted its parts: the shards are complete, the parts belong to no job."""
    preprocess(job)
    folder = Path(f"{job.output_prefix}.parts")
    folder.mkdir()
    (folder / "000000.0.bin").write_bytes(b"x")
    assert not preprocess(job).made
    assert not folder.exists()


def test_moved_text_is_the_same_text(job, tmp_path, corpus_file):
    preprocess(job)
    moved = tmp_path / "elsewhere.jsonl"
    moved.write_bytes(corpus_file.read_bytes())
    status = corpus_file.stat()
    os.utime(moved, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not preprocess(dataclasses.replace(job, inputs=(str(moved),))).made
    os.utime(moved)
    with pytest.raises(DataError, match="corpus.jsonl .* instead of .*elsewhere.jsonl .* written"):
        preprocess(dataclasses.replace(job, inputs=(str(moved),)))


def test_other_files_under_the_prefix_are_refused(job, tmp_path, corpus_file):
    ((prefix, _),) = preprocess(job).shards
    with pytest.raises(DataError, match="with --append-eod"):
        preprocess(dataclasses.replace(job, append_eod=False))
    with pytest.raises(DataError, match="with the tokenizer SentencePiece.*instead of Null"):
        preprocess(dataclasses.replace(job, tokenizer=NULL, vocab_size=5))
    (tmp_path / "t.txt").write_text("one|two")
    with pytest.raises(DataError, match="1 input files instead of 2"):
        preprocess(dataclasses.replace(job, inputs=(*job.inputs, str(tmp_path / "t.txt"))))
    separated = dataclasses.replace(job, inputs=(str(tmp_path / "t.txt"),), output_prefix=str(tmp_path / "t"))
    preprocess(separated)
    with pytest.raises(DataError, match=r"documents separated by '\|'"):
        preprocess(dataclasses.replace(separated, text_separator="|"))
    Path(f"{prefix}.bin").write_bytes(b"")
    with pytest.raises(DataError, match="has 0 bytes"):
        preprocess(job)
    Path(f"{prefix}.manifest.json").unlink()
    with pytest.raises(DataError, match="without its manifest"):
        preprocess(job)


# ---- gigatoken ------------------------------------------------------------------------------------------------------


def test_a_difference_in_the_middle_of_the_job_restarts_it(job, shard, monkeypatch, small_parts):
    pytest.importorskip("gigatoken")
    encode = encoders.GigatokenEncoder.encode
    encoded = []

    def differ_later(encoder, texts):
        encoded.append(len(texts))
        if len(encoded) == 4:
            raise encoders.EncoderMismatchError("near 'x' its ids are [1], those of the library [2]")
        return encode(encoder, texts)

    monkeypatch.setattr(encoders.GigatokenEncoder, "encode", differ_later)
    messages, seen = [], []
    ((prefix, manifest),) = preprocess(job, seen.append, messages.append).shards
    assert shard_bytes(prefix) == shard_bytes(shard)
    assert manifest.encoder == "SentencePieceTokenizer's own library"
    assert messages[0].startswith("tokenizing with gigatoken")
    assert "the job starts over: in " in messages[1] and "corpus.jsonl: near 'x'" in messages[1]
    assert [progress.num_documents for progress in seen].count(0) == 2
    encoded.clear()
    with pytest.raises(CapabilityError, match="--encoder gigatoken cannot be used: in .*corpus.jsonl"):
        preprocess(dataclasses.replace(job, encoder="gigatoken", overwrite=True))


def test_a_small_input_does_not_wait_for_gigatoken(job, monkeypatch):
    monkeypatch.setattr(preprocess_module, "choose_encoder", None)  # nothing calls it
    messages = []
    preprocess(job, on_message=messages.append)
    assert "the input is small" in messages[0]


def test_the_librarys_batches_are_bounded(tmp_path, monkeypatch):
    """For an input of any size, an encoder gets one batch at a time."""
    monkeypatch.setattr(encoders.LibraryEncoder, "batch_bytes", 1000)
    monkeypatch.setattr("megafp8.data.preprocessing.readers.BLOCK_BYTES", 500)
    seen = []
    encode = encoders.LibraryEncoder.encode

    def watch(encoder, texts):
        seen.append(sum(map(len, texts)))
        return encode(encoder, texts)

    monkeypatch.setattr(encoders.LibraryEncoder, "encode", watch)
    preprocess(null_job(tmp_path, ["1 2 3 4"] * 5000))
    assert max(seen) < 2000
    assert len(seen) > 20
