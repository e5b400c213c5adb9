"""The datatrove example: a corpus with short, repetitive and duplicate documents becomes shards of the others."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.cli import preprocess

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("datatrove", reason="datatrove is not installed")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.mark.slow
def test_filtered_and_deduplicated_text_becomes_shards(tmp_path: Path, capsys) -> None:
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(500)]
    good = ["\n".join(" ".join(rng.choices(words, k=20)) for _ in range(10)) for _ in range(30)]
    bad = ["too short", "the same line of a few words\n" * 40]
    (tmp_path / "raw").mkdir()
    # Near duplicates have one more word. The second file is theirs.
    for name, texts in (("a", [*good, *bad]), ("b", [f"{text} more" for text in good[:7]])):
        lines = [json.dumps({"text": text, "id": f"{name}{number}"}) + "\n" for number, text in enumerate(texts)]
        (tmp_path / "raw" / f"{name}.jsonl").write_text("".join(lines))
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/clean_with_datatrove.py"), "--input", str(tmp_path / "raw"),
         "--output", str(tmp_path / "clean"), "--tasks", "2"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    texts = [text for path in sorted((tmp_path / "clean/text").glob("*.parquet"))
             for text in parquet.read_table(path).column("text").to_pylist()]  # fmt: skip
    assert sorted(text.removesuffix(" more") for text in texts) == sorted(good)

    own = ["--input", str(tmp_path / "clean/text"), "--output-prefix", str(tmp_path / "corpus"), "--append-eod"]
    assert preprocess.main([*own, "--tokenizer-type", "ByteLevelTokenizer", "--workers", "1"]) == 0
    tokens = sum(len(text.encode()) + 1 for text in texts)
    assert f"corpus_text_document: 30 documents, {tokens:,} tokens" in capsys.readouterr().out
