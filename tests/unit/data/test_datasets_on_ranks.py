"""Datasets built by several ranks together: equal on all ranks. A bad shard stops all ranks and none waits."""

import os
import shutil

import pytest
import torch
from ranks import run_ranks

from megafp8.config.batch_schedule import constant
from megafp8.config.schema import DataConfig
from megafp8.data import index_cache
from megafp8.data.datasets import build_datasets
from megafp8.data.loader import build_loader
from megafp8.data.tokenizers.build import build_tokenizer
from megafp8.errors import DataError

NUM_SAMPLES = 40
CONSUMED = 8


def configure(tokenizer_config, tmp_path, *data_path):
    return DataConfig(
        tokenizer_type=tokenizer_config.tokenizer_type,
        tokenizer_model=tokenizer_config.tokenizer_model,
        data_path=data_path,
        data_cache_path=str(tmp_path / "cache"),
        seq_length=8,
        split="90,10,0",
    )


def build_train(config):
    return build_datasets(config, build_tokenizer(config), (NUM_SAMPLES, 4, 0), seed=1234)[0]


def read_slice(config):
    """Tokens of each microbatch of this rank."""
    loader = build_loader(
        build_train(config),
        consumed_samples=CONSUMED,
        micro_batch_size=2,
        data_parallel_rank=torch.distributed.get_rank(),
        data_parallel_size=torch.distributed.get_world_size(),
        batch_schedule=constant(8),
        num_workers=0,
        total_samples=NUM_SAMPLES,
    )
    return [batch["tokens"].tolist() for batch in loader]


def read_complete(config):
    dataset = build_train(config)
    return [dataset[number]["tokens"].tolist() for number in range(CONSUMED, NUM_SAMPLES)]


def error_of(config):
    with pytest.raises(DataError) as caught:
        build_train(config)
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_one_order(tmp_path, shard, tokenizer_config, world_size):
    config = configure(tokenizer_config, tmp_path, "1", shard, "2", shard)
    ranks = run_ranks(world_size, read_slice, config)
    together = [sample for microbatches in zip(*ranks, strict=True) for one in microbatches for sample in one]
    assert together == run_ranks(1, read_complete, config)[0]


def test_a_cache_that_cannot_be_written_stops_all_ranks(tmp_path, shard, tokenizer_config):
    """Only rank 0 writes, so only rank 0 detects it."""
    (tmp_path / "cache").touch()
    first, second = run_ranks(2, error_of, configure(tokenizer_config, tmp_path, shard))
    assert first == second
    assert "cannot be written" in first and "--data-cache-path" in first


def test_machines_that_share_no_cache_build_their_own(tmp_path, shard, tokenizer_config):
    def read():
        rank = torch.distributed.get_rank()
        config = configure(tokenizer_config, tmp_path / str(rank), "1", shard, "2", shard)
        return [sample["tokens"].tolist() for sample in map(build_train(config).__getitem__, range(NUM_SAMPLES))]

    first, second = run_ranks(2, read)
    assert first == second
    assert list((tmp_path / "0" / "cache").iterdir()) and list((tmp_path / "1" / "cache").iterdir())


def test_a_shard_of_another_size_on_one_machine_is_reported(tmp_path, shard, tokenizer_config):
    def open_mine():
        rank = torch.distributed.get_rank()
        folder = tmp_path / str(rank)
        folder.mkdir()
        os.chdir(folder)  # both ranks name the shard alike
        for suffix in (".bin", ".idx"):
            shutil.copyfile(shard + suffix, f"copy{suffix}")
        if rank == 1:
            os.truncate("copy.bin", os.path.getsize("copy.bin") - 2)
            return error_of(configure(tokenizer_config, folder, "copy"))
        return build_train(configure(tokenizer_config, folder, "copy")) and ""

    assert "on the machine of rank 0: all machines need the same shards" in run_ranks(2, open_mine)[1]


def test_a_bad_shard_stops_all_ranks(tmp_path, tokenizer_config):
    first, second = run_ranks(2, error_of, configure(tokenizer_config, tmp_path, str(tmp_path / "none")))
    assert first == second
    assert "none.idx" in first


def test_only_the_first_rank_of_a_machine_hashes_the_indices(tmp_path, shard, tokenizer_config, monkeypatch):
    config = configure(tokenizer_config, tmp_path, "1", shard, "2", shard)
    checked = []
    load = index_cache.load_entry
    monkeypatch.setattr(
        index_cache, "load_entry", lambda folder, name, *rest: checked.append(all(rest)) or load(folder, name, *rest)
    )

    def build():
        first = torch.distributed.get_rank() in (0, 2)  # two machines
        build_datasets(config, build_tokenizer(config), (NUM_SAMPLES, 4, 0), seed=1234, is_first_of_machine=first)
        return checked

    ranks = run_ranks(4, build)
    assert all(ranks[0]) and all(ranks[2])
    assert ranks[1] and not any(ranks[1] + ranks[3])
