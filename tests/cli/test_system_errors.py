"""A full disk, an output folder that cannot be made, and hostile names and numbers: one line and a status."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from shard_writer import ShardWriter

from megafp8.cli.common import returns_exit_status
from megafp8.cli.subcommands import SUBCOMMANDS
from megafp8.metrics.records import EvalRecord, EventRecord, QuantizationRecord, RunRecord, StepRecord, TensorStats
from megafp8.metrics.sinks import JsonlSink
from megafp8.utils.files import atomic_write

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --bf16 --train-iters 10 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 60"
)
# What each command writes at {out}, from the inputs that `inputs` makes.
WRITERS = {
    "compare": "{run} {other} --output-dir {out}",
    "report": "{run} {other} --output-dir {out}",
    "plot-statistics": "{run} --output-dir {out}",
    "inspect-quantization": "normal:16x16 --output-dir {out}",
    "inspect-shards": "{shard} --plot {out}/lengths.png",
    "merge-shards": "--input {shard} {shard}2 --output-prefix {out}/joined",
    "corpus": "--output {out}/text.jsonl --folder {modules}",
    "preprocess": "--input {text} --output-prefix {out}/text --tokenizer-type ByteLevelTokenizer --workers 1",
    "train-tokenizer": "--input {text} --vocab-size 260 --model-type byte-bpe --model-prefix {out}/tokens",
    "plot-schedule": f"{MODEL} --output {{out}}/schedule.png",
    "plan": "--gpus 1 --model-preset tiny --vocab-size 60 --global-batch-size 4 --plot {out}/plan.png",
    "study": "{study} --folder {out} --local",
}


def write_run(folder: Path, loss: float, detail: str = "grows") -> Path:
    sink = JsonlSink(folder / "records.jsonl")
    sink.write(RunRecord(config_hash="00", config={}, world_size=1, layout={}, recipe=folder.name, device_name="cpu"))
    for step in (1, 2, 3):
        common = {"step": step, "loss": loss if step == 2 else 3.0, "consumed_tokens": 1000 * step}
        sink.write(StepRecord(**common, consumed_samples=step, learning_rate=1e-3, step_ms=10.0, tokens_per_second=1e5))
        sink.write(EvalRecord(**common, split="valid", perplexity=20.0, num_tokens=500, eval_ms=1.0))
    stats = TensorStats(format="e5m2", num_values=4, num_non_finite=0, amax=1.0, underflow_fraction=0.1)
    sink.write(QuantizationRecord(step=3, recipe="mxfp8", tensors={"layers.0.linear_fc1.input.row": stats}))
    sink.write(EventRecord(step=3, name="health", detail=detail))
    sink.close()
    return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file or folder of each kind that the commands read."""
    root = tmp_path_factory.mktemp("inputs")
    for name in ("shard", "shard2"):
        with ShardWriter(str(root / name), np.dtype(np.uint16)) as writer:
            writer.add_documents(np.arange(3, dtype=np.uint16).tobytes(), np.array([3]))
            writer.finish()
    (root / "modules").mkdir()
    (root / "modules" / "a.py").write_text("value = 1\n" * 99)
    (root / "text.jsonl").write_text('{"text": "some text of a few words"}\n' * 99)
    flags = MODEL.replace("--train-iters 10", "--position-embedding-type rope")  # a study has tokens
    (root / "study.yaml").write_text(f"name: a\ntokens: 1e3\nflags: {flags}\ngrid: {{lr: [0.1]}}\n")
    return {
        "run": write_run(root / "run", 3.1), "other": write_run(root / "other", 3.2), "shard": root / "shard",
        "modules": root / "modules", "text": root / "text.jsonl", "study": root / "study.yaml",
    }  # fmt: skip


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may get longer than 0 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def main_of(name: str) -> Callable[[list[str]], int]:
    return importlib.import_module(f"megafp8.cli.{name.replace('-', '_')}").main


@pytest.mark.parametrize("name", [name for name in SUBCOMMANDS if name != "pretrain"])
def test_an_error_of_the_system_is_one_line_of_every_command(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "out/a\x1b[31m")

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", fail)
    monkeypatch.setattr(sys, "argv", [name])
    assert main_of(name)(["--seed", "1"]) == os.EX_IOERR
    said = capsys.readouterr().err
    assert said.endswith("out/a\\x1b[31m: Read-only file system\n") and said.count("\n") == 1


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk(name: str, inputs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word.format(out=tmp_path / "out", **inputs) for word in WRITERS[name].split()]
    with full_disk():
        assert main_of(name)(words) == os.EX_IOERR
    said = capsys.readouterr().err
    assert "Traceback" not in said and "File too large" in said, said


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_cannot_be_made(name: str, inputs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = [word.format(out="/dev/full/x", **inputs) for word in WRITERS[name].split()]
    status = main_of(name)(words)
    said = capsys.readouterr().err
    assert status in (64, 66, 74) and "Traceback" not in said and "/dev/full" in said, said


def test_a_lack_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    @returns_exit_status()
    def main(argv: Sequence[str]) -> int:
        raise MemoryError

    assert main([]) == 70
    assert capsys.readouterr().err.startswith("OutOfMemory: the system gave this process no more memory")


def test_an_error_of_a_write_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with pytest.raises(OSError, match="File too large: '.*/report.json'"), full_disk(), atomic_write(path) as stream:
        stream.write(b"{}")
    assert not list(tmp_path.iterdir())


def test_names_are_drawn_and_printed_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a$\\frac{b}$ \x1b[31m"
    run = str(write_run(tmp_path / name, 3.1, detail=f"{name} grows"))
    assert main_of("compare")([run]) == 0
    assert main_of("plot-statistics")([run, "--output-dir", str(tmp_path / name)]) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err and name.replace("\x1b", "\\x1b") in said.out


def test_a_loss_that_cannot_be_drawn_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / name, loss)) for name, loss in (("beyond", 1e308), ("high", 1e5))]
    assert main_of("report")([*runs, "--output-dir", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "beyond: 2 losses, the first in step 2, are infinite or not a number, and left out of the plots" in said
    assert "high: " not in said
