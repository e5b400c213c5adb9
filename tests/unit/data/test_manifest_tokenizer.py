"""The tokenizer of a run whose flags name none."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from megafp8.config import flags
from megafp8.data.manifest_tokenizer import tokenizer_of_shards
from megafp8.data.shards import ShardManifest


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    (tmp_path / "tok.model").write_bytes(b"x")
    manifest = ShardManifest(
        tokenizer=None, json_key="text", append_eod=True, dtype="uint16", num_documents=1, num_sequences=1,
        num_tokens=1, bin_bytes=2, bin_sha256="", idx_bytes=2, idx_sha256="", sources=[],
        tokenizer_settings={"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(tmp_path / "tok.model")},
    )  # fmt: skip
    (tmp_path / "c.manifest.json").write_text(json.dumps(asdict(manifest)))
    return str(tmp_path / "c")


def resolve(*argv: str) -> tuple[str | None, str | None, list[str], list[str]]:
    warnings, problems = list[str](), list[str]()
    data = flags.parse_with_problems(argv)[0].config.data
    values = tokenizer_of_shards(data, None, warnings, problems)
    kind, model = (values.get(f"data.{name}") for name in ("tokenizer_type", "tokenizer_model"))
    return kind, model, warnings, problems


def test_it_is_that_of_the_manifest_and_flags_win(prefix: str, tmp_path: Path) -> None:
    model = str(tmp_path / "tok.model")
    kind, path, warnings, problems = resolve("--data-path", "0.5", prefix)
    assert (kind, path, problems) == ("SentencePieceTokenizer", model, [])
    flags_used = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {model}"
    assert warnings == [f"tokenizer of {prefix}.manifest.json: {flags_used}"]
    given = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "7")
    assert resolve("--train-data-path", prefix, *given) == (None, None, [], [])
    assert resolve("--data-path", "absent") == (None, None, [], [])


def test_a_tokenizer_that_has_moved_is_named(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "tok.model").unlink()
    kind, _, warnings, (problem,) = resolve("--data-path", prefix)
    assert kind is None and not warnings
    assert (
        problem.startswith("--tokenizer-type is missing: ") and f"--tokenizer-model {tmp_path / 'tok.model'}" in problem
    )
