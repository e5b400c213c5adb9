"""Shards in object storage give the tokens of local ones, through a bounded cache that processes share."""

from __future__ import annotations

import multiprocessing
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from object_server import HOST, ObjectServer, object_server
from shard_files import SUFFIXES, write_shard

pytest.importorskip("megatron.core")
from megafp8.config.schema import DataConfig
from megafp8.data import object_tokens
from megafp8.data.datasets import build_datasets
from megafp8.data.gpt_dataset import GuardedIndexedDataset
from megafp8.data.shard_verification import check_shard, content_key
from megafp8.data.shards import bin_path, load_manifest
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.errors import DataError
from megafp8.utils import object_store
from megafp8.utils.object_store import ObjectFolder, RetryPolicy, cache_root, listed_folder

DOCUMENTS = [np.random.default_rng(number).integers(0, 1000, 100 + number).tolist() for number in range(40)]
BLOCK_BYTES = 512


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectServer]:
    with object_server() as server:
        server.make_bucket("bucket")
        yield server


@pytest.fixture
def server(running: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectServer]:
    monkeypatch.setattr(object_store, "POLICY", RetryPolicy(3, 0.005, 10.0, 1))
    monkeypatch.setattr(object_tokens, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setenv("MEGAFP8_CACHE", str(tmp_path / "cache"))
    yield running
    running.faults = lambda request: None


@pytest.fixture
def shard(server: ObjectServer, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, str]:
    """A local shard and its copy in object storage, as prefixes."""
    local = write_shard(tmp_path / "s", DOCUMENTS)
    return local, upload(local, request.node.name)


def upload(local: str, folder: str) -> str:
    listed_folder.cache_clear()
    for suffix in SUFFIXES:
        if Path(local + suffix).exists():
            ObjectFolder(f"s3://bucket/{folder}").upload(Path(local + suffix), f"s{suffix}")
    return f"s3://bucket/{folder}/s"


def read_all(dataset: GuardedIndexedDataset) -> list[list[int]]:
    return [dataset[number].tolist() for number in range(len(dataset))]


def blocks() -> list[Path]:
    return [path for path in (cache_root() / "blocks").glob("*/*") if not path.name.startswith(".")]


def test_the_tokens_are_those_of_the_local_shard(shard: tuple[str, str], server: ObjectServer) -> None:
    local, url = shard
    index = check_shard(url, 1000)
    assert index.num_tokens == sum(map(len, DOCUMENTS)) and content_key(url) == content_key(local)
    assert load_manifest(url) == load_manifest(local)
    dataset = GuardedIndexedDataset(url, mmap=True)
    assert read_all(dataset) == DOCUMENTS and dataset.get(3, 5, 7).tolist() == DOCUMENTS[3][5:12]
    seen = len(server.requests)
    assert read_all(dataset) == DOCUMENTS and len(server.requests) == seen
    assert read_all(pickle.loads(pickle.dumps(dataset))) == DOCUMENTS
    assert bin_path(url).stat().st_size == 0


def test_packed_sequences_are_those_of_the_local_shard(shard: tuple[str, str], tmp_path: Path) -> None:
    config = DataConfig(seq_length=64, packing="best-fit", split="1", data_cache_path=str(tmp_path / "indices"))
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 1000)
    local, remote = (
        build_datasets(replace(config, data_path=(prefix,)), tokenizer, (100, 0, 0), seed=1234)[0] for prefix in shard
    )
    assert len(local) == len(remote) >= 100
    for number in range(len(local)):
        assert all(torch.equal(value, remote[number][key]) for key, value in local[number].items())


def test_only_the_blocks_that_are_read_are_downloaded(shard: tuple[str, str], server: ObjectServer) -> None:
    dataset = GuardedIndexedDataset(shard[1], mmap=False)
    assert dataset[20].tolist() == DOCUMENTS[20]
    assert 1 <= len(blocks()) <= 2


def test_the_cache_is_bounded(shard: tuple[str, str]) -> None:
    dataset = GuardedIndexedDataset(shard[1])
    dataset.bin_reader.tokens.cache_bytes = 4 * BLOCK_BYTES
    for _ in range(2):
        assert read_all(dataset) == DOCUMENTS
        assert sum(path.stat().st_size for path in blocks()) <= 4 * BLOCK_BYTES


def test_a_forked_process_reads_too(shard: tuple[str, str]) -> None:
    """obstore's threads do not exist in it: a process of its own reads for it."""
    dataset = GuardedIndexedDataset(shard[1])
    assert dataset[0].tolist() == DOCUMENTS[0]
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        assert pool.map(dataset.__getitem__, range(40))[7].tolist() == DOCUMENTS[7]


def test_one_process_reads_all_shards_of_a_forked_process(shard: tuple[str, str]) -> None:
    datasets = [GuardedIndexedDataset(url) for url in (shard[1], upload(shard[0], "second"))]

    def num_children(connection: Connection) -> None:
        assert all(dataset[0].tolist() == DOCUMENTS[0] for dataset in datasets)
        connection.send(len(psutil.Process().children()))

    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=num_children, args=(sender,))
    process.start()
    sender.close()
    assert receiver.recv() == 1
    process.join()


def test_the_address_of_a_profile_is_used_for_tokens_too(
    shard: tuple[str, str], server: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "msc.yaml"
    options = f"{{base_path: bucket, endpoint_url: '{server.environment['AWS_ENDPOINT_URL']}'}}"
    config.write_text(f"profiles:\n  mine:\n    storage_provider: {{type: s3, options: {options}}}\n")
    monkeypatch.setenv("MSC_CONFIG", str(config))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{HOST}:9")  # nobody listens
    dataset = GuardedIndexedDataset(shard[1].replace("s3://bucket", "msc://mine"))
    assert dataset[0].tolist() == DOCUMENTS[0]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(dataset.__getitem__, range(40))[7].tolist() == DOCUMENTS[7]


def test_damaged_blocks_are_read_again(shard: tuple[str, str]) -> None:
    dataset = GuardedIndexedDataset(shard[1])
    read_all(dataset)
    for path in blocks():
        path.write_bytes(b"cut")
    assert read_all(dataset) == DOCUMENTS


@pytest.mark.parametrize("fault", ["500", "cut", "denied"])
def test_errors_name_the_object(shard: tuple[str, str], server: ObjectServer, fault: str) -> None:
    dataset = GuardedIndexedDataset(shard[1])
    server.faults = lambda request: fault if ".bin" in request else None
    with pytest.raises(DataError, match=re.escape(f"Tokens cannot be read: {shard[1]}.bin: ")):
        dataset[0]
    assert blocks() == []
    server.faults = lambda request: None
    assert dataset[0].tolist() == DOCUMENTS[0]


def test_a_shard_that_is_replaced_stops_the_run(shard: tuple[str, str], tmp_path: Path) -> None:
    local, url = shard
    dataset = GuardedIndexedDataset(url)
    assert dataset[0].tolist() == DOCUMENTS[0]
    write_shard(tmp_path / "s", DOCUMENTS[::-1])
    upload(local, url.split("/")[3])
    with pytest.raises(DataError, match=r"s.bin: it was replaced while it was read"):
        read_all(dataset)
    assert read_all(GuardedIndexedDataset(url)) == DOCUMENTS[::-1]


def test_truncated_and_missing_shards_are_refused(shard: tuple[str, str], tmp_path: Path) -> None:
    local, url = shard
    Path(f"{local}.bin").write_bytes(Path(f"{local}.bin").read_bytes()[:-2])
    upload(local, url.split("/")[3])
    with pytest.raises(DataError, match=rf"{url}.bin has \d+ bytes, but according to its index"):
        check_shard(url, 1000)
    with pytest.raises(DataError, match=rf"Shard {url}2: {url}2.bin and {url}2.idx missing"):
        check_shard(f"{url}2", 1000)
    with pytest.raises(DataError, match="no such bucket"):
        check_shard("s3://absent/s", 1000)
