"""The preprocessing benchmark at its smallest size: both pipelines produce the same shard, and memory is limited."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks import preprocess

SMALL = "--megabytes 1 --sample-megabytes 1 --vocab-size 2000 --rounds 1 --workers 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for library in ("gigatoken", "tokenizers", "tiktoken"):
        pytest.importorskip(library)
    return tmp_path_factory.mktemp("benchmark")


def test_both_pipelines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "result.json"
    preprocess.main([*SMALL.split(), "--folder", str(folder), "--cases", "tiktoken", "--json", str(path)])
    result = json.loads(path.read_text())["results"]["tiktoken"]
    assert result["encoder"].startswith("gigatoken")
    assert set(result["times"]) == {"megafp8", "single writer"}
    assert result["documents"] > 300
    assert "tiktoken: single writer takes" in capsys.readouterr().out


@pytest.mark.long
def test_parts_and_their_merge(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    preprocess.main([*SMALL.split(), "--folder", str(folder), "--cases", "tiktoken", "--parts", "--json", str(path)])
    assert "parts and merge" in json.loads(path.read_text())["results"]["tiktoken"]["times"]


def test_different_shards_are_detected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(script: str, case: object, corpus: Path, prefix: Path, *more: object) -> tuple[float, float]:
        if "single_writer" not in script:
            return real(script, case, corpus, prefix, *more)
        for suffix in (".bin", ".idx"):
            content = Path(f"{folder}/ours_text_document{suffix}").read_bytes()
            Path(f"{prefix}_text_document{suffix}").write_bytes(content[:-1] + b"x")
        return 1.0, 1.0

    real = preprocess.run_pipeline
    monkeypatch.setattr(preprocess, "run_pipeline", run)
    with pytest.raises(AssertionError, match="made other shards"):
        preprocess.main([*SMALL.split(), "--folder", str(folder), "--cases", "unigram"])


def test_the_library_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preprocess.main([*SMALL.split(), "--folder", str(folder), "--cases", "unigram", "--library"])
    assert "SentencePiece unigram: library alone takes" in capsys.readouterr().out


@pytest.mark.long
def test_memory_does_not_grow_with_the_input(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An input larger than the memory limit of a process."""
    corpus = preprocess.write_corpus(folder / "corpus1.jsonl", 10**6)
    with open(folder / "corpus300.jsonl", "wb") as stream:
        for _ in range(280):
            stream.write(corpus.read_bytes())
    limited = [*SMALL.split(), "--folder", str(folder), "--cases", "byte", "--megabytes", "300"]
    preprocess.main([*limited, "--memory-limit-mb", "200"])
    assert "byte-level BPE: no process used more than" in capsys.readouterr().out
    with pytest.raises(subprocess.CalledProcessError):
        preprocess.main([*limited, "--memory-limit-mb", "60"])
