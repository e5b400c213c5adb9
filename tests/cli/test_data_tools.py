"""The data tools as a person runs them: corpus, tokenizer, shards; again; and wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
TOOLS = ("build_index", "build_stdlib_corpus", "train_tokenizer", "preprocess_data")


def run(tool, *arguments, status=0):
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=60)
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize("tool", TOOLS)
def test_help(tool):
    assert "python tools/" in run(tool, "--help")


def test_from_nothing_to_shards_and_again(tmp_path):
    corpus = ("build_stdlib_corpus", "--output", tmp_path / "c.jsonl", "--max-bytes", 300_000)
    text = ("--input", tmp_path / "c.jsonl")
    tokenizer = ("train_tokenizer", *text, "--vocab-size", 600, "--model-prefix", tmp_path / "t")
    shards = (
        *("preprocess_data", *text, "--output-prefix", tmp_path / "s", "--append-eod"),
        *("--workers", 2, "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tmp_path / "t.model"),
    )
    assert "written" in run(*corpus)
    assert "came back exactly" in run(*tokenizer)
    assert "tokens/s" in run(*shards)
    files = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert "s_text_document.bin" in files

    assert "unchanged" in run(*corpus)
    assert "there already" in run(*tokenizer)
    assert "there already" in run(*shards)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files


def test_megatrons_unneeded_flags_are_answered(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "1 2 3"}\n')
    output = run(
        *("preprocess_data", "--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "a", "--workers", 1),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", 10, "--partitions", 1),
    )
    assert "--partitions has no effect" in output


@pytest.mark.parametrize(
    "arguments",
    [
        ("train_tokenizer", "--vocab-size", 600, "--model-prefix", "/tmp/t"),
        ("preprocess_data", "--output-prefix", "/tmp/s", "--tokenizer-type", "NullTokenizer", "--vocab-size", 5),
    ],
)
def test_bad_input_is_one_clear_error(arguments):
    assert "--input /none.jsonl: there is no such file" in run(*arguments, "--input", "/none.jsonl", status=66)


def test_build_index_and_again(tmp_path, capsys):
    pytest.importorskip("megatron.core")
    from tools import build_index

    (tmp_path / "a.jsonl").write_text('{"text": "1 2 3 4 5 6 7 8 9"}\n' * 90)
    tokenizer = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 10)
    source = ("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "a", "--workers", 1)
    run("preprocess_data", *source, *tokenizer)
    flags = (
        *("--data-path", tmp_path / "a_text_document", "--seq-length", 8, "--train-iters", 20, "--num-layers", 2),
        *("--global-batch-size", 4, "--eval-iters", 1, "--split", "90,10", "--data-cache-path", tmp_path / "c"),
    )
    output = run("build_index", *flags, *tokenizer)
    assert output.count("building the index of") == 2
    assert "training: 91 samples of 8 tokens from 1 shard\n" in output
    assert f"the indices in {tmp_path / 'c'} are complete" in output

    arguments = [str(argument) for argument in (*flags, *tokenizer)]
    assert build_index.main([*arguments, "--train-iters", "22"]) == 0
    assert "building" not in capsys.readouterr().out, "no more epochs are needed"
    assert build_index.main([*arguments, "--seed", "2"]) == 0
    assert capsys.readouterr().out.count("building") == 2
    assert build_index.main(["--mock-data", "--train-iters", "3"]) == 64
    found = capsys.readouterr().err
    for problem in ("--mock-data has no shards", "--seq-length is missing", "--global-batch-size is missing"):
        assert problem in found
    Path(f"{tmp_path}/a_text_document.bin").write_bytes(b"")
    assert build_index.main(arguments) == 66


def test_tools_do_not_import_torch():
    imports = "import megafp8.data.preprocess, megafp8.data.tokenizer_training"
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
