"""The tools that inspect, merge and split shards, as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.cli import inspect_shards, merge_shards
from megafp8.config.schema import DataConfig
from megafp8.data.preprocessing.plan import PreprocessJob
from megafp8.data.preprocessing.preprocess import preprocess

ROOT = Path(__file__).resolve().parents[2]
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")


@pytest.fixture
def shard(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "1 2 3"}\n{"text": ""}\n{"text": "4 5 6 7"}\n', encoding="utf-8")
    job = PreprocessJob(
        inputs=(str(tmp_path / "text.jsonl"),), output_prefix=str(tmp_path / "s"),
        tokenizer=DataConfig(tokenizer_type="NullTokenizer"), vocab_size=100, append_eod=True,
    )  # fmt: skip
    return preprocess(job).shards[0][0]


def test_inspect_as_a_command_needs_no_torch(shard):
    code = (
        "import sys; from megafp8.cli import inspect_shards; status = inspect_shards.main(); "
        "sys.exit(status or 7 * ('torch' in sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, f"{shard}.idx", "--verify"],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    for text in ("9 in 18 bytes", "3 in 2 sequences, 1 without tokens", "NullTokenizer", "4 5 6 7 100", "SHA-256 of"):
        assert text in result.stdout
    assert "WRONG" not in result.stdout


def test_inspect_prints_json(shard, capsys):
    assert inspect_shards.main([shard, "--json", "--verify", "--documents", "3", "--max-tokens", "2"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["is_sound"]
    assert report["summary"]["num_tokens"] == 9
    assert [document["text"] for document in report["documents"]] == ["1 2", "", "4 5"]
    assert {result["passed"] for result in report["findings"]} == {True}


def test_inspect_writes_a_picture(shard, tmp_path, capsys):
    assert inspect_shards.main([shard, "--plot", str(tmp_path / "pictures" / "lengths.png")]) == 0
    assert (tmp_path / "pictures" / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_inspect_refuses_a_picture_without_a_format(shard, tmp_path, capsys):
    assert inspect_shards.main([shard, "--plot", str(tmp_path / "lengths")]) == 64
    assert "lengths: must end in .png, .svg, .pdf" in capsys.readouterr().err


def test_inspect_reports_damage(shard, tmp_path, capsys):
    with open(f"{shard}.bin", "r+b") as stream:
        stream.write(b"\7")
    assert inspect_shards.main([shard]) == 0  # the index is valid, and nothing more was requested
    assert inspect_shards.main([shard, "--verify"]) == 66
    assert "WRONG  SHA-256 of the tokens" in capsys.readouterr().out
    assert inspect_shards.main([shard, str(tmp_path / "none"), "--json"]) == 66
    reports = json.loads(capsys.readouterr().out)
    assert "missing" in reports[1]["error"]
    assert reports[0]["summary"]["num_documents"] == 3


def test_inspect_decodes_documents_only_with_a_tokenizer(shard, capsys):
    Path(f"{shard}.manifest.json").unlink()
    assert inspect_shards.main([shard]) == 0
    told = capsys.readouterr()
    assert "no manifest names its tokenizer" in told.err
    assert "1 2 3 100" in told.out  # as ids
    assert inspect_shards.main([shard, "--json", *NULL]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["documents"][0]["text"] == "1 2 3 100"


def test_inspect_refuses_another_tokenizer_than_the_manifests(shard, capsys):
    assert inspect_shards.main([shard, "--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]) == 66
    assert "vocab_size 101, eod 100, which is not NullTokenizer" in capsys.readouterr().err


def test_merge_and_split(shard, tmp_path, capsys):
    divide = ["--input", shard, "--output-prefix", str(tmp_path / "parts" / "p"), "--documents-per-part", "2"]
    assert merge_shards.main(divide) == 0
    assert "p_00001-of-00002: 1 documents, 5 tokens" in capsys.readouterr().out
    assert merge_shards.main(divide) == 0
    assert "p_00001-of-00002 is there already" in capsys.readouterr().out
    assert merge_shards.main(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "all")]) == 0
    assert (tmp_path / "all.bin").read_bytes() == Path(f"{shard}.bin").read_bytes()
    assert inspect_shards.main([str(tmp_path / "all"), "--verify"]) == 0
    assert "documents 0 to 2 of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--input", "SHARD", "--output-prefix", "OUT", "--split", "1;2"], 64, "--split 1;2 must be"),
        (["--input", "OUT", "--output-prefix", "OUT2"], 66, "missing"),
        (["--input", "SHARD", "--output-prefix", "/dev/null/x"], 74, "failed"),
    ],
)
def test_merge_reports_errors(shard, tmp_path, capsys, arguments, status, message):
    paths = {"SHARD": shard, "OUT": str(tmp_path / "out"), "OUT2": str(tmp_path / "out2")}
    assert merge_shards.main([paths.get(word, word) for word in arguments]) == status
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("tool", ["inspect_shards", "merge_shards"])
def test_help(tool):
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60)
    assert result.returncode == 0
    assert "\n    megafp8 " in result.stdout
