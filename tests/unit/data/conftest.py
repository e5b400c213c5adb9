"""A small corpus, tokenizer and shard that the tests of the data path share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafp8.config.schema import DataConfig
from megafp8.data.preprocessing import plan
from megafp8.data.preprocessing import preprocess as preprocess_module
from megafp8.data.preprocessing.plan import PreprocessJob
from megafp8.data.preprocessing.preprocess import preprocess
from megafp8.data.preprocessing.tokenizer_training import train_tokenizer


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Sixty short programs with tabs, blank lines, digits and letters beyond ASCII."""
    program = "def function_{n}(x):\n\treturn  x + {n}{n}  # gr\u00fc\u00dfe {n}\n\n\nclass Thing{n}:\n\t'Doc {n}.'\n"
    return [program.format(n=n) * (1 + n % 3) for n in range(60)]


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    lines = [json.dumps({"text": text, "title": f"title {n}"}) + "\n" for n, text in enumerate(documents)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer_config(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path) -> DataConfig:
    prefix = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    train_tokenizer([str(corpus_file)], str(prefix), vocab_size=320)
    return DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=f"{prefix}.model")


@pytest.fixture(scope="session")
def shard(tmp_path_factory: pytest.TempPathFactory, corpus_file: Path, tokenizer_config: DataConfig) -> str:
    """Prefix of a shard of the corpus. Tests must not change its files; they copy it."""
    job = PreprocessJob(
        inputs=(str(corpus_file),),
        output_prefix=str(tmp_path_factory.mktemp("shard") / "corpus"),
        tokenizer=tokenizer_config,
        append_eod=True,
    )
    return preprocess(job).shards[0][0]


@pytest.fixture
def job(tmp_path: Path, corpus_file: Path, tokenizer_config: DataConfig) -> PreprocessJob:
    """The corpus as a preprocessing job with its own shard."""
    return PreprocessJob(
        inputs=(str(corpus_file),),
        output_prefix=str(tmp_path / "out" / "c"),
        tokenizer=tokenizer_config,
        append_eod=True,
    )


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of about 2 kB, so that a small corpus has many, and a requested encoder is used."""
    monkeypatch.setattr(plan, "SMALLEST_PART_BYTES", 2000)
    monkeypatch.setattr(plan, "MIN_PARTS", 1 << 30)
    monkeypatch.setattr(preprocess_module, "SMALL_INPUT_BYTES", 0)
