"""Snapshots on request, with torch's function in CUDA replaced."""

from __future__ import annotations

import os
import signal
import types
from pathlib import Path

import pytest
import torch

from megafp8.cli import pretrain as cli
from megafp8.config import flags
from megafp8.training import memory_report, pretrain
from megafp8.training.extensions.memory_snapshots import MemorySnapshots
from megafp8.training.memory_report import MemoryReport, snapshot_path

FLAGS = "--model-preset tiny --micro-batch-size 4 --global-batch-size 4 --train-iters 2 --lr 1e-3 --bf16 --mock-data"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    paths: list[str] = []

    def dump(path: str) -> None:
        paths.append(path)
        Path(path).write_text("snapshot", encoding="utf-8")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return paths


def state(extra: str, kind: str = "cuda") -> types.SimpleNamespace:
    run = types.SimpleNamespace(
        config=flags.parse(f"{FLAGS} {extra}".split()).config,
        platform=types.SimpleNamespace(kind=kind),
        rank_position=types.SimpleNamespace(rank=3),
    )
    return types.SimpleNamespace(run=run, step=7)


def test_a_signal_writes_one_snapshot_after_the_step(tmp_path: Path, written: list[str], capsys) -> None:
    at, extension = state(f"--memory-snapshot-path {tmp_path}/memory.pickle"), MemorySnapshots()
    before = signal.getsignal(signal.SIGUSR2)
    extension.open(at)
    extension.after_step(at, None)
    assert written == []
    os.kill(os.getpid(), signal.SIGUSR2)
    extension.after_step(at, None)
    extension.after_step(at, None)
    extension.close(at, None)
    assert written == [f"{tmp_path}/memory_rank3.pickle"]
    assert capsys.readouterr().out == f"step 7: memory snapshot {tmp_path}/memory_rank3.pickle\n"
    assert signal.getsignal(signal.SIGUSR2) is before


@pytest.mark.parametrize("extra", ["--memory-snapshot-path x", "--record-memory-history", ""])
def test_a_signal_outside_of_the_training_loop_does_not_end_the_rank(extra: str, monkeypatch) -> None:
    """In setup, and in the last evaluation. Without snapshots the signal keeps its meaning."""
    found, before = [], signal.getsignal(signal.SIGUSR2)
    monkeypatch.setattr("megafp8.utils.best_effort.best_effort", lambda stream: stream)
    monkeypatch.setattr(pretrain, "run_training", lambda _: found.append(signal.getsignal(signal.SIGUSR2)) or 0)
    model = "--seq-length 32 --tokenizer-type NullTokenizer --vocab-size 255"
    assert cli.main(f"{FLAGS} {model} {extra}".split()) == 0
    assert found == [signal.SIG_IGN if extra else before]
    assert signal.getsignal(signal.SIGUSR2) is before


def test_the_flag_of_megatron_lm_alone_writes_to_the_run_folder(tmp_path: Path) -> None:
    config = state(f"--record-memory-history --save {tmp_path}").run.config
    assert snapshot_path(config, 0) == tmp_path / "snapshot_rank0.pickle"
    assert snapshot_path(state("").run.config, 0) is None


def test_a_disk_that_is_full_and_a_cpu_say_so_once(tmp_path: Path, monkeypatch, capsys) -> None:
    def full(path: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    at, extension = state(f"--memory-snapshot-path {tmp_path}/memory.pickle"), MemorySnapshots()
    extension.open(at)
    extension.is_requested = True
    extension.after_step(at, None)
    extension.close(at, None)
    assert "the disk is full; training continues" in capsys.readouterr().out
    on_cpu, extension = state(f"--memory-snapshot-path {tmp_path}/memory.pickle", "cpu"), MemorySnapshots()
    extension.open(on_cpu)
    extension.close(on_cpu, None)
    assert "only GPUs have snapshots" in capsys.readouterr().out


def test_lack_of_memory_takes_a_snapshot_at_once(tmp_path: Path, written: list[str], monkeypatch, capsys) -> None:
    observers = []
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": []})
    report = MemoryReport(state(f"--memory-snapshot-path {tmp_path}/memory.pickle").run.config, 1)
    report.start()
    observers[0](0, 1 << 30, 1 << 30, 0)
    assert report.snapshot == {"segments": []} and written == [f"{tmp_path}/memory_rank1.pickle"]
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: 1 / 0)
    observers[0](0, 1 << 30, 1 << 30, 0)  # the error of torch stays the one that ends the run
    monkeypatch.setattr(memory_report, "owners_of", lambda run: 1 / 0)
    report.run = object()
    capsys.readouterr()
    observers[0](0, 1 << 30, 1 << 30, 0)
    assert len(written) == 3, "a snapshot needs no owners"
    assert capsys.readouterr().out == "warning: no report on the memory: ZeroDivisionError: division by zero\n"
