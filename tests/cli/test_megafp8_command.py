"""The `megafp8` command: its subcommands, and its message for unknown ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked_script import run_script

from megafp8 import __version__
from megafp8.cli import main
from megafp8.cli.subcommands import COMMANDS, INTERNAL, SUBCOMMANDS

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*(ROOT / "tools").glob("*.py"), *(ROOT / "launcher").glob("*.py")])
RUNS = re.compile(r"run\(\"([a-z-]+)\"\)")
SHARED_MODULES = {
    "__init__",
    "main",
    "subcommands",
    "common",
    "completion",
    "job_options",
    "stability_checkpoint",
    "progress_display",
    "command_flags",
    "profile_report",
    "goodput_flags",
    "built_in_data",
    "training_pool",
}


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_help_of_a_subcommand(name: str) -> None:
    result = run_script("megafp8/cli/main.py", name, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: megafp8 {name} ")
    assert not re.search(r"(tools|launcher|examples)/|pretrain_gpt", result.stdout)


def test_every_module_is_a_subcommand_and_a_script_runs_one() -> None:
    modules = {path.stem for path in (ROOT / "megafp8/cli").glob("*.py")}
    assert modules - SHARED_MODULES == {name.replace("-", "_") for name in SUBCOMMANDS}
    run_by_scripts = [name for script in SCRIPTS for name in RUNS.findall(script.read_text(encoding="utf-8"))]
    assert len(run_by_scripts) == len(SCRIPTS)
    assert {*run_by_scripts, "pretrain", "goodput"} == set(SUBCOMMANDS)


def test_the_command_lists_subcommands_without_importing_them() -> None:
    code = (
        "import sys; from megafp8.cli import main; status = main.main(sys.argv[1:]); "
        "assert sum(name.startswith('megafp8') for name in sys.modules) == 5; sys.exit(status)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    for name, text in SUBCOMMANDS.items():
        assert (f"\n  {name:20}  {text}\n" in result.stdout) == (name not in INTERNAL)
    assert [line for line in result.stdout.splitlines() if line in COMMANDS] == list(COMMANDS)
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_the_exit_status_is_the_subcommands(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["megafp8"])
    assert main.main(["plan", "--gpus", "0", "--model-preset", "tiny"]) == 64
    assert capsys.readouterr().err.startswith("plan: 1 problem with the settings:\n  - --gpus 0")


@pytest.mark.parametrize(
    "words",
    [
        "-m megafp8.cli.main plan --gpus 8",
        "-m megafp8.cli.main study --help",
        "tools/build_index.py --help",
        "tools/evaluate.py --help",
        "launcher/stability.py --help",
    ],
)
def test_a_recipe_module_that_exits_is_reported(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "mine.py"
    module.write_text("import sys\nsys.exit(0)")
    monkeypatch.setenv("MEGAFP8_RECIPES", str(module))
    result = subprocess.run([sys.executable, *words.split()], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 64
    assert f"{module}: SystemExit: 0" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["preproces", "--help"], "megafp8: preproces: no such subcommand; did you mean preprocess?"),
        (["train_tokeniser"], "did you mean train-tokenizer?"),
        (["qqq"], "megafp8: qqq: no such subcommand; see --help"),
        ([], "megafp8: which subcommand?"),
    ],
)
def test_an_unknown_subcommand(words: list[str], text: str, capsys) -> None:
    assert main.main(words) == 64
    output, errors = capsys.readouterr()
    assert output == "" and text in errors


def test_underscores_are_hyphens(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["megafp8"])
    with pytest.raises(SystemExit):
        main.main(["plot_schedule", "--help"])
    assert capsys.readouterr().out.startswith("usage: megafp8 plot-schedule ")


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_version_of_a_subcommand(name: str) -> None:
    result = run_script("megafp8/cli/main.py", name, "--version")
    assert (result.returncode, result.stdout) == (0, f"megafp8 {__version__}\n"), result.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_of_a_checkout_names_the_subcommand(script: Path) -> None:
    """One spelling of commands, however they are started."""
    result = run_script(script.relative_to(ROOT).as_posix(), "--help")
    (name,) = RUNS.findall(script.read_text(encoding="utf-8"))
    assert result.returncode == 0 and result.stdout.startswith(f"usage: megafp8 {name} "), result.stderr


def test_version(capsys) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megafp8 {__version__}\n"
