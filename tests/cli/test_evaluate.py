"""`megafp8 evaluate`: the loss of the run's own validation, the exact mean over tokens, several checkpoints."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from shard_writer import ShardWriter
from small_run import COMMON, PLAIN, STYLES

from megafp8.analysis.runs import load_run
from megafp8.cli import evaluate
from megafp8.config import flags, rules
from megafp8.device import capability, platform
from megafp8.training.language_model import load_language_model
from megafp8.training.pretrain import train
from megafp8.training.setup import build_training_run

FP8 = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
LENGTH = "--train-iters 4 --lr-warmup-iters 1 --save-interval 2 --eval-iters 3 --eval-interval 2 --no-progress-bar"
TOKENS = 4000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, and runs in FP32, in FP8 and with borders of documents: checkpoints and validations at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("runs")
    ids = np.random.default_rng(0).integers(0, 255, TOKENS).astype(np.uint16)
    ids[49::50] = 255  # the end of each document
    with ShardWriter(str(folder / "shard"), np.dtype(np.uint16)) as writer:
        writer.add_documents(ids.tobytes(), np.full(TOKENS // 50, 50, np.int32))
        writer.finish()
    for name, precision in (("fp32", PLAIN), ("fp8", FP8), ("documents", f"{PLAIN} --reset-attention-mask")):
        words = COMMON.replace("--mock-data", f"--data-path {folder / 'shard'} --split 70,30,0")
        save = f"--save {folder / name} --eval-global-batch-size 4"
        config = flags.parse(f"{words} {STYLES['llama']} {precision} {LENGTH} {save}".split()).config
        assert not rules.problems(config, 1)

        def start(config: Any = config) -> None:
            implementation = capability.layer_backend(config.model, config.precision, capability.detect_target())
            train(build_training_run(config, platform.detect_platform(), implementation))

        run_ranks(1, start)
    return folder


def measure(folder: Path, *words: object) -> list[dict[str, Any]]:
    """The JSON of --output."""
    output = folder / "losses.json"
    command = [str(word) for word in (*words, "--output", output)]
    assert run_ranks(1, evaluate.main, command) == [0]
    return json.loads(output.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["fp32", "fp8", "documents"])
def test_loss_is_that_of_the_runs_own_validation(name: str, folder: Path) -> None:
    """The same samples in the same microbatches: the sums differ in the order of FP32 and FP64 only."""
    results = measure(folder, "--load", folder / name, "--ckpt-step", 2, 4)
    validations = load_run(folder / name).evals_of("valid")
    assert [result["num_tokens"] for result in results] == [record.num_tokens for record in validations] == [384, 384]
    assert [result["loss"] for result in results] == pytest.approx([each.loss for each in validations], rel=1e-6)
    assert results[0]["loss"] != results[1]["loss"]


def test_loss_is_the_mean_over_all_tokens_of_the_data(folder: Path) -> None:
    """Against one forward pass for each window, averaged by hand; the last window is short."""
    (result,) = measure(folder, "--load", folder / "fp32", "--data-path", folder / "shard", "--tokens", 1005)

    def expected() -> float:
        model = load_language_model(folder / "fp32", uses_cache=False)
        ids = torch.from_numpy(np.fromfile(folder / "shard.bin", np.uint16).astype(np.int64))[:1006]
        losses = []
        with torch.no_grad():
            for first in range(0, 1005, 32):
                window = ids[first : first + 33]
                logits = model.module(window[None, :-1], torch.arange(len(window) - 1)[None], None)[0].double()
                losses.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
        return float(torch.cat(losses).mean())

    assert result["num_tokens"] == 1005
    assert result["loss"] == pytest.approx(run_ranks(1, expected)[0], rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))


def test_several_runs_and_another_precision(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runs = ("--load", folder / "fp8", folder / "fp32", "--data-path", folder / "shard", "--tokens", 320)
    trained, high = measure(folder, *runs), measure(folder, *runs, "--precision", "high")
    assert [result["num_tokens"] for result in trained] == [320, 320]
    assert trained[0]["loss"] != high[0]["loss"]
    assert trained[1]["loss"] == high[1]["loss"]
    (again,) = measure(folder, "--load", folder / "fp32", *runs[3:], "--precision", "tensorwise")
    assert again["loss"] != high[1]["loss"]
    assert "fp32/iter_0000004" in capfd.readouterr().out


def test_questions(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Their losses are compared with a plain softmax in tests/distributed/test_task_scores.py."""
    lines = [{"context": "1 2 3", "choices": [" 4", " 5"], "answer": 1}, {"context": "7 " * 40, "target": "8"}]
    (folder / "numbers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    words = ("--load", folder / "fp32", folder / "fp8", "--tasks", folder / "numbers.jsonl")
    results, (alone, _) = measure(folder, *words), measure(folder, *words, "--micro-batch-size", 1)
    first = results[0]["tasks"]["numbers"]
    assert (first["num_questions"], first["num_truncated"]) == (2, 1)
    assert first["accuracy"] in (0, 1)
    assert alone["tasks"]["numbers"]["bits_per_byte"] == pytest.approx(first["bits_per_byte"], rel=1e-6)
    assert results[1]["tasks"]["numbers"]["bits_per_byte"] != first["bits_per_byte"]
    output = capfd.readouterr()
    assert "1 of 2 questions are longer than the context window" in output.err
    assert re.search(r"fp8/iter_0000004 +numbers +2 +\S+% +\S+% +\d+\.\d{4} ", output.out)


@pytest.mark.parametrize(
    "words, text",
    [
        ("--tokens 0", "--tokens 0: must be 1 or more"),
        ("--seq-length 16", "--seq-length: the run's validation samples"),
        ("--data-path nowhere --tokens 5", "nowhere"),
        ("--data-path {shard} --seq-length 64", "must be a multiple of 1 of at most 32"),
        ("--tasks nowhere.jsonl", "task file nowhere.jsonl cannot be read"),
        ("--tasks nowhere.jsonl --tokens 5", "--tokens has no effect with --tasks"),
        ("--data-path {shard} --precision delayed", "amax history"),
    ],
)
def test_wrong_flags(words: str, text: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["--load", str(folder / "fp32"), *words.format(shard=folder / "shard").split()]
    (status,) = run_ranks(1, evaluate.main, command)
    assert status != 0
    assert text in capfd.readouterr().err
