"""Commands given unreadable files and impossible paths: a named error immediately, no traceback."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import hostile_files
import numpy as np
import pytest
from forked_script import ROOT, run_script
from shard_writer import ShardWriter

from megafp8.checkpoint.directory import folder_name

BIG_LAYERS = b'{"model_type": "gpt2", "vocab_size": 100, "n_layer": 1e12}'


def given(*words: str) -> Callable[[Path], tuple[Path, tuple[object, ...]]]:
    """The file itself is an argument, after these words."""
    return lambda folder: (folder / "file", (*words, folder / "file"))


def inside(name: str, *words: str) -> Callable[[Path], tuple[Path, tuple[object, ...]]]:
    """The folder that contains the file is an argument, in the place of "{}"."""

    def place(folder: Path) -> tuple[Path, tuple[object, ...]]:
        (folder / name).parent.mkdir(exist_ok=True)
        return folder / name, tuple(word.format(folder) for word in words)

    return place


def manifest_of_shard(folder: Path) -> tuple[Path, tuple[object, ...]]:
    with ShardWriter(str(folder / "shard"), np.dtype(np.uint16)) as writer:
        writer.add_documents(np.arange(3, dtype=np.uint16).tobytes(), np.array([3]))
        writer.finish()
    return folder / "shard.manifest.json", (folder / "shard",)


COMMANDS = {
    "--config": ("pretrain_gpt.py", given("--dry-run", "--config"), 64),
    "--precision-map": ("pretrain_gpt.py", given("--dry-run", "--precision-map"), 64),
    "job": ("launcher/slurm.py", given("--dry-run"), 64),
    "study": ("launcher/scaling_study.py", given("--dry-run"), 64),
    "config.json": ("tools/convert_checkpoint.py", inside("config.json", "from-hf", "{}", "{}/out"), 74),
    "manifest.json": ("tools/checkpoint.py", inside(f"{folder_name(1)}/manifest.json", "verify", "{}"), 74),
    "shard's manifest": ("tools/inspect_shards.py", manifest_of_shard, 66),
    "points.json": ("tools/scaling_report.py", given(), 66),
    "study.json": ("tools/scaling_report.py", inside("study.json", "{}"), 66),
}


@pytest.mark.parametrize("hostile", ["fifo", "deep lists", "long integer"])
@pytest.mark.parametrize("command", COMMANDS)
def test_files(command: str, hostile: str, tmp_path: Path) -> None:
    script, place, status = COMMANDS[command]
    path, words = place(tmp_path)
    if hostile in hostile_files.KINDS:
        hostile_files.KINDS[hostile](path)
    else:
        path.write_bytes(hostile_files.JSON[hostile])
    ended = run_script(script, *words)
    said = ended.stderr + ended.stdout
    assert ended.returncode == status, said
    assert "Traceback" not in said and len(said) < 3000
    assert hostile != "fifo" or "a named pipe" in said or command == "points.json"  # a folder there


@pytest.mark.parametrize("line", ["deep lists", "long integer", "NaN", "overflow"])
def test_a_line_of_records(line: str, tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(b"\n" + hostile_files.JSON[line] + b"\n")
    for script in ("tools/compare_runs.py", "tools/plot_telemetry.py"):
        ended = run_script(script, tmp_path)
        assert ended.returncode == 66 and "records.jsonl, line 2: not valid JSON" in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (BIG_LAYERS, "--num-layers 1000000000000 must be at most 10,000"),
        (BIG_LAYERS.replace(b"1e12", b"1" + b"0" * 60), "must be at most 10,000"),
        (BIG_LAYERS.replace(b"1e12", b"Infinity"), "Infinity is no JSON number"),
        (BIG_LAYERS.replace(b"1e12", b'2, "n_embd": 1e12'), "--hidden-size 1000000000000 must be at most 1,048,576"),
    ],
)
def test_an_impossible_shape_is_refused(content: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    ended = run_script("tools/convert_checkpoint.py", "from-hf", tmp_path, tmp_path / "out")
    assert ended.returncode == 74 and text in ended.stderr, ended.stderr


# --- paths ------------------------------------------------------------------------------------------------------------

PATHS = ("x" * 300, "runs/\udcff")
# The words before the path, or with "{}" in its place.
ARGUMENTS = {
    "launcher/check_nodes.py": ["judge {} --nodes a"],
    "launcher/scaling_study.py": ["{}", "study.yaml --folder {}"],
    "launcher/kubernetes.py": ["{}", "--output {}", "--project {}", "--name a -- --save {} --load {}"],
    "launcher/slurm.py": ["{}", "--logs {}", "--output {}", "--mounts {}", "--name a -- --save {} --load {}"],
    "launcher/torchrun.py": ["{}", "--logs {}", "--mounts {}", "--name a -- --save {} --load {}"],
    "launcher/stability.py": ["--output-dir {}"],
    "launcher/supervise.py": ["--run-folder {} -- true", "-- pretrain_gpt.py --save {} --load {}"],
    "tools/build_index.py": ["--data-path {}"],
    "tools/build_stdlib_corpus.py": ["--output {}", "--output o --folder {}"],
    "tools/checkpoint.py": ["verify {}"],
    "tools/compare_runs.py": ["{}", "run --output-dir {}"],
    "tools/convert_checkpoint.py": ["to-hf {} out", "to-hf run {}", "from-hf {} out", "to-hf a b --vocab-file {}"],
    "tools/coordinate_check.py": ["--output-dir {}"],
    "tools/doctor.py": ["--folder {}"],
    "tools/evaluate.py": ["--load {}"],
    "tools/generate_text.py": ["--load {}", "--load run --prompt-file {}", "--load run --merge-file {}"],
    "tools/inspect_quantization.py": ["{}", "normal:2x2 --output-dir {}"],
    "tools/inspect_shards.py": ["{}", "shard --plot {}"],
    "tools/merge_shards.py": ["--input {} --output-prefix o", "--input a b --output-prefix {}"],
    "tools/plan.py": ["--gpus 8 --plot {}", "--gpus 8 --save {}"],
    "tools/plot_lr_schedule.py": ["--output {}", "--config {}"],
    "tools/plot_telemetry.py": ["{}", "run --output-dir {}"],
    "tools/preprocess_data.py": ["--input {} --output-prefix o", "--input a --output-prefix {} --vocab-file f"],
    "tools/precision_table.py": ["--output-dir {}", "--output-dir out -- --data-path {}"],
    "tools/report.py": ["{}", "run --output-dir {}", "profile {}"],
    "tools/run_comparison.py": ["--output-dir {}", "--output-dir out -- --data-path {}"],
    "tools/scaling_report.py": ["{}", "study --output-dir {}"],
    "tools/train_tokenizer.py": ["--vocab-size 300 --model-prefix m --input {}"],
    "tools/verify_device.py": ["--output {}"],
    "pretrain_gpt.py": ["--config {}", "--save {}", "--load {}", "--data-path 1 {}", "--precision-map {}"],
}


@pytest.mark.parametrize("script", ARGUMENTS)
def test_paths(script: str, capsys, monkeypatch) -> None:
    main = main_of(script)
    for words in ARGUMENTS[script]:
        for path in PATHS:
            monkeypatch.setattr(sys, "argv", [script])
            try:
                status = main([word.format(path) for word in words.split()])
            except SystemExit as error:
                status = error.code
            said = capsys.readouterr().err
            assert status in (2, 64), f"{words}: {status}: {said}"
            is_named = "is no path of a file" in said or "remove the control characters" in said  # of a job
            assert is_named, f"{words}: {said}"


def test_every_command_is_tested() -> None:
    found = {f"{folder}/{name}" for folder in ("tools", "launcher") for name in os.listdir(ROOT / folder)}
    assert {name for name in found if name.endswith(".py")} | {"pretrain_gpt.py"} == set(ARGUMENTS)


def main_of(script: str) -> Callable[[list[str]], object]:
    """The function that a script calls, which takes its words."""
    named = re.search(r'run\("(.*)"\)|from megafp8\.cli\.(\w+) import main\n', (ROOT / script).read_text())
    return importlib.import_module(f"megafp8.cli.{(named[1] or named[2]).replace('-', '_')}").main
