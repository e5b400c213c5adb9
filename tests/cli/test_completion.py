"""Completion of `megafp8`, driven as a shell drives it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.cli import completion
from megafp8.cli.subcommands import SUBCOMMANDS
from megafp8.config.gpu_names import COMPUTE_CAPABILITIES

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "megafp8.cli.main"]


def complete(line: str, folder: Path) -> set[str]:
    """The words that may stand at the end of a line that is typed in this folder."""
    output = folder / ".completions"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(output),
    }  # fmt: skip
    done = subprocess.run(COMMAND, env=environment, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return set(output.read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("megafp8 ", {*SUBCOMMANDS, "-h", "--help", "--version"}),
        ("megafp8 pre", {"pretrain", "preprocess", "precision-table"}),
        ("megafp8 no-such --v", {"--version"}),
        ("megafp8 pretrain --fp8-rec", {"--fp8-recipe"}),
        ("megafp8 pretrain --no-fp8-p", {"--no-fp8-param-gather"}),
        ("megafp8 pretrain --bf16 --fp8-format ", {"e4m3", "hybrid", "e5m2", "none"}),
        ("megafp8 pretrain --model-preset llama3-", {"llama3-8b", "llama3-70b", "llama3-405b"}),
        ("megafp8 pretrain --load ru", {"runs/"}),
        ("megafp8 checkpoint sh", {"show"}),
        ("megafp8 checkpoint show --ckpt", {"--ckpt-step"}),
        ("megafp8 plan --gpu ", set(COMPUTE_CAPABILITIES)),
        ("megafp8 plan --gpu h200 --fp8-recipe r", {"rowwise"}),
        ("megafp8 build-index --data-cache-p", {"--data-cache-path"}),
        ("megafp8 plot_schedule --output-l", {"--output-logit-softcapping"}),
        ("megafp8 torchrun j", {"job.yaml"}),
        ("megafp8 torchrun job.yaml --endp", {"--endpoint"}),
        ("megafp8 torchrun job.yaml -- --fp8-recipe t", {"tensorwise"}),
    ],
)
def test_words_at_the_end_of_a_line(line: str, words: set[str], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "job.yaml").touch()
    assert complete(line, tmp_path) == words


def test_no_subcommand_needs_torch() -> None:
    code = (
        "import sys\n"
        "from megafp8.cli.completion import SUBCOMMANDS, parser_for\n"
        "for name in SUBCOMMANDS:\n"
        "    parser, start = parser_for(['megafp8', name])\n"
        "    assert start == 1 and '--version' in parser._option_string_actions, name\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_tables_name_subcommands() -> None:
    tables = completion.WITH_TRAINING_FLAGS, completion.WITH_TRAINING_FLAGS_AFTER_DASHES
    assert {name for names in tables for name in names} <= set(SUBCOMMANDS)
    assert set(completion.WITHOUT_OWN_FLAGS) <= set(completion.WITH_TRAINING_FLAGS)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes(shell: str, tmp_path: Path) -> None:
    """With the function that register-python-argcomplete gives to the shell."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = tmp_path / "megafp8"
    program.write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    register = f'eval "$({sys.executable} -m argcomplete.scripts.register_python_argcomplete megafp8)"\n'
    ask = {
        "bash": "COMP_LINE='megafp8 pretrain --fp8-rec' COMP_POINT=26 COMP_TYPE=9\n"
        '_python_argcomplete megafp8; echo "${COMPREPLY[@]}"',
        "zsh": "BUFFER='megafp8 pretrain --fp8-rec' CURSOR=26 words=(megafp8 pretrain --fp8-rec)\n"
        "_describe() { print -r -- ${(P)2}; }\n_python_argcomplete",
    }
    start = {"bash": "", "zsh": "autoload -U compinit && compinit -u -D\n"}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [shell, "-c", start[shell] + register + ask[shell]], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("--fp8-recipe"), done.stdout + done.stderr
