"""Datasets built by two ranks at once: the same on both, and a bad shard stops both instead of leaving one waiting."""

import multiprocessing
from datetime import timedelta

import pytest
import torch

from megafp8.config.schema import DataConfig, RunConfig
from megafp8.data.datasets import build_datasets
from megafp8.data.loader import build_loader
from megafp8.data.tokenizer import build_tokenizer
from megafp8.errors import DataError

pytest.importorskip("megatron.core")
NUM_SAMPLES = 40


def read_shard(rank, rendezvous, config, answers):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=10)
    )
    try:
        datasets = build_datasets(config, build_tokenizer(config.data), (NUM_SAMPLES, 4, 0))
        loader = build_loader(
            datasets[0],
            consumed_samples=8,
            micro_batch_size=2,
            data_parallel_rank=rank,
            data_parallel_size=2,
            global_batch_size=8,
            num_workers=0,
            total_samples=NUM_SAMPLES,
        )
        answers.put((rank, [batch["tokens"].tolist() for batch in loader]))
    except DataError as error:
        answers.put((rank, str(error)))
    torch.distributed.destroy_process_group()


def run_two_ranks(tmp_path, config):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [
        context.Process(target=read_shard, args=(rank, tmp_path / "rendezvous", config, answers)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    found = dict(answers.get(timeout=20) for _ in ranks)
    for process in ranks:
        process.join(timeout=20)
        assert process.exitcode == 0
    return found[0], found[1]


def configure(tokenizer_config, tmp_path, *data_path):
    return RunConfig(
        data=DataConfig(
            tokenizer_type=tokenizer_config.tokenizer_type,
            tokenizer_model=tokenizer_config.tokenizer_model,
            data_path=data_path,
            data_cache_path=str(tmp_path / "cache"),
            seq_length=8,
            split="90,10,0",
        )
    )


def test_two_ranks_share_one_order(tmp_path, shard, tokenizer_config):
    config = configure(tokenizer_config, tmp_path, "1", shard, "2", shard)
    first, second = run_two_ranks(tmp_path, config)
    assert len(first) == len(second) == (NUM_SAMPLES - 8) // 4
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        whole = build_datasets(config, build_tokenizer(config.data), (NUM_SAMPLES, 4, 0))[0]
    finally:
        torch.distributed.destroy_process_group()
    together = [sample for pair in zip(first, second, strict=True) for microbatch in pair for sample in microbatch]
    assert together == [whole[number]["tokens"].tolist() for number in range(8, NUM_SAMPLES)]


def test_a_bad_shard_stops_both_ranks(tmp_path, tokenizer_config):
    first, second = run_two_ranks(tmp_path, configure(tokenizer_config, tmp_path, str(tmp_path / "none")))
    assert first == second
    assert "none.idx" in first
