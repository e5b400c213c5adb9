"""Plans and dry runs count attention within documents where the data tells their lengths."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from plans import run_of
from shard_writer import ShardWriter

from megafp8.config import flags, model_shapes
from megafp8.config.model_shapes import PRESETS
from megafp8.config.schema import RunConfig
from megafp8.config.settings import with_values
from megafp8.device.gpus import GPUS
from megafp8.planning import compute
from megafp8.planning.dry_run import describe_run
from megafp8.planning.plan import make_plan
from megafp8.planning.step_time import step_time
from megafp8.training.checks import check

RUN = (
    "--model-preset llama-1b --seq-length 2048 --train-iters 10 --lr 1e-4 --bf16 --micro-batch-size 8 "
    "--global-batch-size 8 --tokenizer-type NullTokenizer --vocab-size 50303"
)
DRY = f"{RUN} --dry-run --target h200 --world-size 1"
FLAG = "--reset-attention-mask"


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of 512 tokens: by chance a sequence cuts a fourth of them."""
    prefix = tmp_path_factory.mktemp("shard") / "a"
    with ShardWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(200):
            writer.add_documents(np.ones(512, np.uint16).tobytes(), np.array([512], np.int32))
        writer.finish()
    return str(prefix)


def dry_run(words: str) -> str:
    return describe_run(check(*flags.parse_with_problems(f"{DRY} {words}".split()))).text


def gflop(text: str) -> float:
    return float(re.search(r"([\d.,]+) GFLOP a token", text)[1])


def seconds(text: str) -> float:
    return float(re.search(r"speed, predicted: ([\d.]+) s a step", text)[1])


def test_short_documents_make_attention_cheaper() -> None:
    run = run_of()
    short = dataclasses.replace(run, document_length=1024.0)
    shorter = run_of({"data.seq_length": 1024, "training.micro_batch_size": 8})
    assert compute.attention_s(short) == pytest.approx(compute.attention_s(shorter))
    assert step_time(short).seconds < step_time(run).seconds
    model = with_values(RunConfig(), PRESETS["llama3-8b"]).model
    assert step_time(short).flops_per_token == model_shapes.flops_per_token(model, short.padded_vocab, 1024)
    assert step_time(run).flops_per_token == model_shapes.flops_per_token(model, run.padded_vocab, 8192)


@pytest.mark.parametrize(("packing", "length"), [("", 469), ("--packing best-fit", 517)])
def test_a_dry_run_counts_attention_within_documents(shard: str, packing: str, length: int) -> None:
    plain, masked = dry_run(f"--data-path {shard}"), dry_run(f"--data-path {shard} {FLAG} {packing}")
    assert f"attention is counted within documents, of {length} of 2,048 tokens on average over tokens" in masked
    assert "attention is counted" not in plain
    saved = 6 * 24 * 2048 * (2048 - length) / 1e9
    assert gflop(plain) - gflop(masked) == pytest.approx(saved, abs=0.002)
    # Of the same data in whole sequences: without borders steps are CUDA graphs.
    assert seconds(masked) < seconds(dry_run(f"--mock-data {FLAG}"))
    assert ("packing best-fit, padding: about 1.020% of tokens" in masked) == bool(packing)


def test_a_dry_run_says_what_it_does_not_know() -> None:
    plain, masked = dry_run("--mock-data"), dry_run(f"--mock-data {FLAG} --packing best-fit")
    reason = "documents are made up; name shards with --data-path"
    assert (
        f"attention is counted over whole sequences, since the lengths of documents are not known ({reason})" in masked
    )
    assert f"packing best-fit, padding: not known ({reason})" in masked
    assert gflop(plain) == gflop(masked)


def test_a_plan_counts_attention_within_documents(shard: str) -> None:
    layout = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1"

    def planned(words: str) -> tuple[float, list[str]]:
        plan = make_plan(flags.parse(f"{RUN} {layout} {words}".split()), GPUS["h200"], 1, ())
        return plan.search.layouts[0].step.flops_per_token, plan.warnings

    plain, masked, unknown = (planned(words) for words in (f"--data-path {shard}", f"--data-path {shard} {FLAG}", FLAG))
    assert masked[0] < plain[0] == unknown[0]
    assert not any("attention" in line for line in plain[1])
    assert any("attention is counted within documents, of 469 of 2,048 tokens" in line for line in masked[1])
    assert any("attention is counted over whole sequences" in line for line in unknown[1])
