"""The training command whose limits leave no memory to start: one line names the limit."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.cli import pretrain

ROOT = Path(__file__).resolve().parents[2]
LIMIT_KIB = 100_000  # enough for Python, not for torch
FLAGS = "--model-preset tiny --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3 --bf16 --mock-data"


def test_a_start_without_memory_for_the_libraries_names_the_limit() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_KIB << 10, LIMIT_KIB << 10))

    command = [sys.executable, "pretrain_gpt.py", *FLAGS.split()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=limit)
    assert result.returncode == 70, result.stderr
    line = result.stderr.splitlines()[-1]
    assert line.startswith("OutOfMemory: ") and f"ulimit -v {LIMIT_KIB} (KiB)" in line
    assert "Traceback" not in result.stderr


def test_a_caller_in_the_process_gets_the_status(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(pretrain, "check_command_line", fail)
    assert pretrain.main([]) == 70
    assert capsys.readouterr().err.startswith("OutOfMemory: MemoryError: ")
