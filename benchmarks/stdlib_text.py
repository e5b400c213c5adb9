"""The small model and the text of the training benchmarks: those of examples/compare_recipes.sh."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 2048
MODEL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 384 --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --qk-layernorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0"
)


def tokenizer_flags(data: Path) -> list[str]:
    """The flags that name the tokenizer."""
    return ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(data / "tokenizer.model")]


def prepare_data(data: Path) -> None:
    """Corpus, tokenizer and token shards, unless they are there.

    Raises:
        CalledProcessError: a tool did not end well; it has said why.
    """
    if (data / "finished").exists():
        return
    data.mkdir(parents=True, exist_ok=True)
    corpus, tokenizer = str(data / "corpus.jsonl"), str(data / "tokenizer")
    run_tool("build_stdlib_corpus", ["--output", corpus])
    run_tool("train_tokenizer", ["--input", corpus, "--vocab-size", str(VOCABULARY), "--model-prefix", tokenizer])
    shards = ["--output-prefix", str(data / "stdlib"), "--append-eod"]
    run_tool("preprocess_data", ["--input", corpus, *shards, *tokenizer_flags(data)])
    (data / "finished").touch()


def run_tool(name: str, words: Sequence[str]) -> None:
    """Run a tool of this project on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(ROOT / "tools" / f"{name}.py"), *words], cwd=ROOT, env=environment, check=True)
