"""The command line of tools/generate_text.py as a user starts it."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked_script import run_script
from saved_run import configure, save_initial

from megafp8.cli import generate as cli_generate
from megafp8.data.preprocessing.tokenizer_training import train_tokenizer

TOOL = Path(__file__).resolve().parents[2] / "tools" / "generate_text.py"
PROMPT = "Grüße, 世界 🙂\n\tdef"


generate = functools.partial(run_script, "tools/generate_text.py")


def start(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=120, encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An FP8 run whose tokenizer has moved since: `run/` and `tokenizer.model`."""
    folder = tmp_path_factory.mktemp("run")
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        json.dumps({"text": Path(cli_generate.__file__).read_text(encoding="utf-8")}) + "\n", encoding="utf-8"
    )
    model = train_tokenizer([str(corpus)], str(folder / "before"), vocab_size=350).model_path
    config = configure("--model-preset tiny --fp8-format hybrid --fp8-recipe tensorwise --no-save-optim", model)
    save_initial(folder / "run", config)
    model.rename(folder / "tokenizer.model")
    return folder


def test_samples_on_the_terminal_and_in_the_file(folder, tmp_path) -> None:
    output = tmp_path / "samples.jsonl"
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    result = start(
        "--load", folder / "run", "--tokenizer-model", folder / "tokenizer.model", "--num-samples", 2,
        "--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", 12, "--output", output,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    samples = [json.loads(line) for line in output.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [sample["seed"] for sample in samples] == [1234, 1235]
    assert samples[0]["text"] != samples[1]["text"]
    shown = (f"=== sample {i + 1} of 2 ===\n{PROMPT}{samples[i]['text']}\n" for i in range(2))
    assert result.stdout.splitlines() == "".join(shown).splitlines()  # a sample may have a carriage return
    assert "iter_0000007: emulated layers, fp32, key-value cache, on cpu" in result.stderr
    assert "trained in FP8 hybrid tensorwise; the key-value cache generates in fp32. --no-cache" in result.stderr
    assert len(re.findall(r"\d+ tokens in [\d.]+ s, [\d.]+ tokens/s, ended by (?:eod|length)\n", result.stderr)) == 2
    assert samples[0]["ended_by"] in ("eod", "length")


def test_greedy_text_file_equals_the_terminal_output(folder, tmp_path) -> None:
    result = generate(
        "--load", folder / "run", "--tokenizer-model", folder / "tokenizer.model", "--ckpt-step", 7, "--greedy",
        "--prompt", PROMPT, "--max-new-tokens", 5, "--precision", "high", "--output", tmp_path / "sample.txt",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(PROMPT)
    assert (tmp_path / "sample.txt").read_text(encoding="utf-8") == result.stdout
    assert "FP8" not in result.stderr


def test_without_a_cache_the_arithmetic_is_that_of_training(folder) -> None:
    result = generate(
        "--load", folder / "run", "--tokenizer-model", folder / "tokenizer.model", "--no-cache", "--max-new-tokens", 2
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "iter_0000007: emulated layers, fp32, FP8 hybrid tensorwise, on cpu" in result.stderr
    assert "cache" not in result.stderr


def test_a_cache_and_quantized_arithmetic_are_refused_together(folder) -> None:
    result = generate(
        "--load", folder / "run", "--tokenizer-model", folder / "tokenizer.model", "--precision", "checkpoint"
    )  # fmt: skip
    assert result.returncode == 64
    assert "--precision checkpoint: the run trained in FP8 hybrid tensorwise" in result.stderr
    assert "add --no-cache" in result.stderr


def test_a_tokenizer_that_moved_is_named_with_its_flag(folder) -> None:
    result = generate("--load", folder / "run")
    assert result.returncode == 66
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert f"{folder / 'before'}.model" in result.stderr
    assert "--tokenizer-model says where it is now" in result.stderr


def test_a_tokenizer_of_another_size_is_refused(folder, tmp_path) -> None:
    other = train_tokenizer([str(folder / "corpus.jsonl")], str(tmp_path / "other"), vocab_size=400).model_path
    result = generate("--load", folder / "run", "--tokenizer-model", other)
    assert result.returncode == 66
    assert "has 400 tokens and the embedding" in result.stderr
    assert "384 rows" in result.stderr


def test_the_type_of_the_tokenizer_may_be_given(folder) -> None:
    """A converted checkpoint may have no tokenizer type."""
    result = generate("--load", folder / "run", "--tokenizer-type", "ByteLevelTokenizer")
    assert result.returncode == 66
    assert "has 512 tokens and the embedding" in result.stderr


def test_a_folder_without_a_checkpoint_is_status_74(tmp_path) -> None:
    result = generate("--load", tmp_path / "absent")
    assert result.returncode == 74
    assert result.stderr == f"generate: --load {tmp_path / 'absent'} does not exist\n"


def test_all_wrong_flags_are_named_with_status_64(folder, tmp_path) -> None:
    result = generate(
        "--load", folder / "run", "--temperature", 0, "--top-p", 2, "--num-samples", 0,
        "--output", tmp_path / "absent" / "samples.jsonl",
    )  # fmt: skip
    assert result.returncode == 64
    for flag in ("--temperature 0", "--top-p 2", "--num-samples 0", "--output"):
        assert f"- {flag}" in result.stderr
    assert generate("--load", folder / "run", "--greedy", "--top-k", 5).returncode == 64
    assert generate("--load", folder / "run", "--greedy", "--temperature", 1).returncode == 64


def test_help_names_every_flag() -> None:
    result = start("--help")
    assert result.returncode == 0
    for flag in (
        "--load",
        "--ckpt-step",
        "--prompt-file",
        "--max-new-tokens",
        "--greedy",
        "--precision",
        "--no-cache",
        "--seed",
    ):
        assert flag in result.stdout
