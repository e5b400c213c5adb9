"""The LM Evaluation Harness on checkpoints and exported ones, without a network, as docs/generate_evaluate.md describes
it."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked_runs import ROOT
from model_logits import in_a_rank, our_module
from saved_run import save_initial

from megafp8.checkpoint.convert.to_huggingface import ExportOptions, plan_export
from megafp8.cli import evaluate
from megafp8.config import flags
from megafp8.data.preprocessing.tokenizer_training import train_tokenizer
from megafp8.data.tokenizers.build import build_tokenizer

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed"),
    pytest.mark.slow,
]
TEXTS = (
    "def add(a, b):\n    return a + b\n",
    "A short line with Grüße and 世界.\n",
    "one two three four five six seven",
)
MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --position-embedding-type rope --normalization RMSNorm --swiglu --qk-layernorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --seed 4321 --seq-length 128 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --lr-warmup-iters 0 --init-method-std 0.2"
)


def bits_per_byte(folder: Path, tokenizer_file: Path) -> float:
    """Of this package's logits. A text follows an end-of-document token, as in the harness and in training."""
    module = our_module(folder)
    config = flags.parse(["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer_file),
                          *MODEL.split()]).config  # fmt: skip
    tokenizer, nats, num_bytes = build_tokenizer(config.data, None), 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([[tokenizer.eod, *tokenizer.tokenize(text)]])
        with torch.no_grad():
            logits = module(ids, torch.arange(ids.shape[1])[None], None)[..., : tokenizer.vocab_size]
        log_probabilities = logits.double().log_softmax(-1)[0, :-1]
        nats -= float(log_probabilities.gather(1, ids[0, 1:, None]).sum())
        num_bytes += len(text.encode())
    return nats / num_bytes / math.log(2)


def prepare_run(folder: Path, *words: str) -> Path:
    """A tokenizer, an initial checkpoint in `run` and its export in `model`; returns the tokenizer's file."""
    corpus = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS)
    (folder / "held_out.jsonl").write_text(corpus, encoding="utf-8")
    train_tokenizer([str(folder / "held_out.jsonl")], str(folder / "tokenizer"), vocab_size=270, model_type="byte-bpe")
    tokenizer_file = folder / "tokenizer/tokenizer.json"
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer_file}"
    save_initial(folder / "run", flags.parse([*MODEL.split(), *tokenizer.split(), *words]).config)
    (folder / "model").mkdir()
    plan_export(folder / "run", ExportOptions()).write(folder / "model", 1 << 30, lambda num_bytes: None)
    return tokenizer_file


def run_harness(folder: Path, command: str, task: str) -> dict[str, float]:
    """The results of a task, by metric."""
    environment = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    options = f"--batch_size 1 --include_path {ROOT}/examples/lm_eval --tasks {task} --output_path results"
    ended = subprocess.run(
        [sys.executable, "-m", *command.split(), *options.split()], cwd=folder, env=os.environ | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    newest = max((folder / "results").rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())["results"][task]


HF = "lm_eval --model hf --model_args pretrained=model,dtype=float32 --device cpu"
OURS = "megafp8.training.lm_eval_model --model megafp8 --model_args load=run"


def test_the_harness_measures_the_same_bits_per_byte(tmp_path: Path) -> None:
    tokenizer_file = prepare_run(tmp_path)
    assert json.loads((tmp_path / "model/config.json").read_text())["model_type"] == "qwen3"
    expected = in_a_rank(bits_per_byte, tmp_path / "run", tokenizer_file)
    for command in (HF, OURS):
        theirs = run_harness(tmp_path, command, "held_out_text")["bits_per_byte,none"]
        assert theirs == pytest.approx(expected, rel=1e-6), command


QUESTIONS = (
    {"context": "def add(a, b):\n    ", "choices": ["return a", "yield", "raise b"], "answer": 0},
    {"context": "A short line with ", "choices": ["Grüße", "世界", "one two"], "answer": 1},
    {"context": "one two " * 60, "choices": ["three", "four five"], "answer": 0},
    {"context": "", "choices": ["seven", " seven", "six"], "answer": 2},
)


def log_likelihoods(folder: Path) -> list[list[tuple[float, bool]]]:
    """Of each question's choices: in the harness's model of the export, and in that of the checkpoint."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from megafp8.training.lm_eval_model import CheckpointLM

    requests = [
        Instance("loglikelihood", {}, (question["context"], choice), index)
        for question in QUESTIONS
        for index, choice in enumerate(question["choices"])
    ]
    theirs = HFLM(pretrained=str(folder / "model"), dtype="float32", device="cpu", max_length=128)
    ours = CheckpointLM(load=str(folder / "run"), batch_size=4)
    return [model.loglikelihood(requests) for model in (theirs, ours)]


def test_the_harness_scores_a_checkpoint_like_its_export_and_like_evaluate(tmp_path: Path) -> None:
    """The vocabulary has no padding, which the losses of training include."""
    prepare_run(tmp_path, "--make-vocab-size-divisible-by", "1")
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    theirs, ours = in_a_rank(log_likelihoods, tmp_path)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-4)
    assert [is_greedy for _, is_greedy in ours] == [is_greedy for _, is_greedy in theirs]

    words = ["--load", tmp_path / "run", "--tasks", tmp_path / "questions.jsonl", "--output", tmp_path / "scores.json"]
    assert in_a_rank(evaluate.main, list(map(str, words))) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())[0]["tasks"]["questions"]
    nats, num_bytes, position = 0.0, 0, 0
    for question in QUESTIONS:
        nats -= ours[position + question["answer"]][0]
        num_bytes += len(question["choices"][question["answer"]].encode())
        position += len(question["choices"])
    assert scores["bits_per_byte"] == pytest.approx(nats / num_bytes / math.log(2), rel=1e-6)
    results = run_harness(tmp_path, OURS, "questions")
    assert (results["acc,none"], results["acc_bytes,none"]) == (scores["accuracy"], scores["normalized_accuracy"])
