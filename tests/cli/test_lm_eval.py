"""The LM Evaluation Harness on an exported checkpoint, without a network, as docs/generate_evaluate.md describes it."""

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


def test_the_harness_measures_the_same_bits_per_byte(tmp_path: Path) -> None:
    corpus = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS)
    (tmp_path / "held_out.jsonl").write_text(corpus, encoding="utf-8")
    train_tokenizer(
        [str(tmp_path / "held_out.jsonl")], str(tmp_path / "tokenizer"), vocab_size=270, model_type="byte-bpe"
    )
    tokenizer_file = tmp_path / "tokenizer/tokenizer.json"
    config = flags.parse(
        f"{MODEL} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer_file}".split()
    ).config
    save_initial(tmp_path / "run", config)
    (tmp_path / "model").mkdir()
    plan_export(tmp_path / "run", ExportOptions()).write(tmp_path / "model", 1 << 30, lambda num_bytes: None)
    assert json.loads((tmp_path / "model/config.json").read_text())["model_type"] == "qwen3"

    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    command = (
        "-m lm_eval --model hf --model_args pretrained=model,dtype=float32 --device cpu --batch_size 1 "
        f"--include_path {ROOT}/examples/lm_eval --tasks held_out_text --output_path results"
    )
    ended = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, env=os.environ | offline, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    (results,) = (tmp_path / "results").rglob("results_*.json")
    theirs = json.loads(results.read_text())["results"]["held_out_text"]["bits_per_byte,none"]
    assert theirs == pytest.approx(in_a_rank(bits_per_byte, tmp_path / "run", tokenizer_file), rel=1e-6)
