"""The data tools as a user runs them: corpus, tokenizer, shards; a second time; and with wrong input."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from forked_script import run_script

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
    assert "    megafp8 " in run(tool, "--help")


def test_corpus_tokenizer_and_shards_twice(tmp_path):
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


def test_text_tokenizers_and_shards_share_a_folder(tmp_path):
    """A repeated command does nothing."""
    run("build_stdlib_corpus", "--output", tmp_path / "c.jsonl", "--max-bytes", 100_000)
    train = ("--input", tmp_path, "--vocab-size", 400, "--model-prefix")
    commands = (
        ("train_tokenizer.py", *train, tmp_path / "tokenizer"),
        ("train_tokenizer.py", *train, tmp_path / "gpt", "--model-type", "byte-bpe"),
        (
            *("preprocess_data.py", "--input", f"{tmp_path}/", "--output-prefix", tmp_path / "corpus", "--workers", 1),
            *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tmp_path / "tokenizer.model"),
        ),
    )
    for tool, *arguments in commands * 2:
        done = run_script(f"tools/{tool}", *arguments)
        assert done.returncode == 0, done.stderr
    assert "is there already" in done.stdout and "ignored 7 files" in done.stdout
    manifest = json.loads((tmp_path / "corpus_text_document.manifest.json").read_text())
    assert [source["path"] for source in manifest["sources"]] == [str(tmp_path / "c.jsonl")]


def preprocess_ids(tmp_path, lines, *arguments, status=0):
    """Preprocess text that consists of ids; returns the output."""
    (tmp_path / "a.jsonl").write_text("".join(lines))
    return run(
        *("preprocess_data", "--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "a", "--workers", 1),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", 10, *arguments),
        status=status,
    )


def test_other_megatron_flags_are_handled(tmp_path):
    output = preprocess_ids(tmp_path, ['{"text": "1 2 3"}\n'], "--partitions", 1, "--keep-sequential-samples")
    assert "--partitions has no effect" in output
    assert "--keep-sequential-samples has no effect" in output
    output = preprocess_ids(tmp_path, [], "--split-sentences", "--workers-to-check", 2, 4, "--workers", 0, status=64)
    for problem in ("3 problems", "--split-sentences: ", "--workers-to-check: ", "--workers 0 is less than 1"):
        assert problem in output


def test_bad_documents_stop_or_are_listed(tmp_path):
    lines = ['{"text": "1 2 3"}\n', "no JSON\n", "\n", '{"text": "99"}\n', '{"text": "4"}\n']
    output = preprocess_ids(tmp_path, lines, status=66)
    assert "a.jsonl line 2: it is not JSON" in output
    output = preprocess_ids(tmp_path, lines, "--on-bad-document", "skip")
    assert "2 documents, 4 tokens" in output
    assert "2 records were skipped, see" in output
    listed = [json.loads(line) for line in (tmp_path / "a.skipped.jsonl").read_text().splitlines()]
    assert [(entry["line"], entry["reason"][:20]) for entry in listed] == [
        (2, "it is not JSON: Expe"), (4, "it has the token id "),
    ]  # fmt: skip


def test_a_long_document_is_refused_until_the_limit_is_raised(tmp_path):
    """In a compressed file that is small. The job resumes where it stopped."""
    lines = ['{"text": "1 2 3"}\n', json.dumps({"text": "1 " * 5000}) + "\n", '{"text": "4"}\n']
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    bomb = (
        *("preprocess_data", "--input", tmp_path / "b.jsonl.gz", "--output-prefix", tmp_path / "b", "--workers", 1),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", 10, "--max-document-bytes"),
    )
    output = run(*bomb, 1000, "--on-bad-document", "skip", status=66)
    assert "b.jsonl.gz has a line of more than 1000 bytes" in output and "raise --max-document-bytes" in output
    assert "3 documents, 5,004 tokens" in run(*bomb, 20_000)
    assert "--max-document-bytes 0 is less than 1" in run(*bomb, 0, status=64)
    tokenizer = ("train_tokenizer", "--input", tmp_path / "b.jsonl.gz", "--model-prefix", tmp_path / "t")
    assert "1000 bytes" in run(*tokenizer, "--vocab-size", 600, "--max-document-bytes", 1000, status=66)


def test_progress_without_a_terminal(tmp_path):
    output = preprocess_ids(tmp_path, ['{"text": "1 2 3"}\n'] * 100, "--log-interval", 50)
    assert "tokenizing with NullTokenizer's own library: the input is small" in output
    assert "100.0% of 0.0 MB, 100 documents, " in output
    assert "0:00:00 left" in output


def test_a_full_disk_and_ctrl_c_are_one_line_errors(tmp_path, monkeypatch, capsys):
    from megafp8.cli import preprocess

    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n')
    arguments = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "a"), "--workers", "1",
                 "--tokenizer-type", "NullTokenizer", "--vocab-size", "10"]  # fmt: skip
    for error, status in ((OSError(28, "No space left on device"), 74), (KeyboardInterrupt(), 130)):
        monkeypatch.setattr(
            "megafp8.data.preprocessing.preprocess.preprocess", lambda *_, error=error: (_ for _ in ()).throw(error)
        )
        assert preprocess.main(arguments) == status
        assert "the same command resumes" in capsys.readouterr().err


def test_separators_are_unescaped(tmp_path):
    (tmp_path / "a.txt").write_text("1 2\n\n3\n4")
    run(
        *("preprocess_data", "--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "a", "--workers", 1),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", 10, "--text-separator", r"\n\n", "--append-eod"),
    )
    assert (tmp_path / "a_text_document.bin").read_bytes() == bytes([1, 0, 2, 0, 10, 0, 3, 0, 4, 0, 10, 0])


@pytest.mark.parametrize(
    "arguments",
    [
        ("train_tokenizer", "--vocab-size", 600, "--model-prefix", "/tmp/t"),
        ("preprocess_data", "--output-prefix", "/tmp/s", "--tokenizer-type", "NullTokenizer", "--vocab-size", 5),
    ],
)
def test_bad_input_is_one_error(arguments):
    assert "--input /none.jsonl: no such file" in run(*arguments, "--input", "/none.jsonl", status=66)


def test_build_index_twice(tmp_path, capsys):
    pytest.importorskip("megatron.core")
    from megafp8.cli import build_index

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
    for problem in ("--mock-data has no shards", "--seq-length is missing", "--tokenizer-type is missing"):
        assert problem in found
    Path(f"{tmp_path}/a_text_document.bin").write_bytes(b"")
    assert build_index.main(arguments) == 66


def test_tools_do_not_import_torch():
    imports = "import megafp8.data.preprocessing.preprocess, megafp8.data.preprocessing.tokenizer_training"
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
