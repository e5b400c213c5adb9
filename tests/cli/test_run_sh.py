"""`tests/run.sh` with a Python that only writes down how it was called: what each of its forms runs."""

import os
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A file a call: several run at once, and long lines of one file could mix.
PYTHON = """#!/usr/bin/env bash
echo "$*" > "$(mktemp {calls}/XXXXXX)"
case "$*" in *"${{FAILS:-nothing}}"*) echo "1 failed"; exit 1 ;; esac
echo "3 passed in 1 s"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests/other_engine.sh").write_text("echo 3 passed\n", encoding="utf-8")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(calls=tmp_path / "calls"), encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / "tools").mkdir()
    set_up = 'export PYTHON="$PWD/.venv/bin/python"\necho "extras $MEGAFP8_EXTRAS"\n'
    (tmp_path / "tools/setup_venv.sh").write_text(set_up, encoding="utf-8")
    return tmp_path


def run(checkout: Path, *arguments: str, **variables: str) -> tuple[int, str, list[str]]:
    """Status, output, and the arguments of each pytest."""
    command = ["bash", "tests/run.sh", *arguments]
    shutil.rmtree(checkout / "calls", ignore_errors=True)
    (checkout / "calls").mkdir()
    done = subprocess.run(
        command, cwd=checkout, env=os.environ | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=120,
    )  # fmt: skip
    calls = [path.read_text().strip() for path in (checkout / "calls").iterdir()]
    return done.returncode, done.stdout, [call for call in calls if "-m pytest" in call]


def first_set() -> set[str]:
    lines = (ROOT / "tests/first_set.txt").read_text(encoding="utf-8").splitlines()
    return {word for line in lines if not line.startswith("#") for word in line.split()}


def test_without_arguments_the_first_set_runs(checkout: Path) -> None:
    status, output, calls = run(checkout)
    assert status == 0 and "about 8 minutes" in output.splitlines()[0] and "extras test" in output
    assert "The first set passed" in output and "bash tests/run.sh --all adds" in output.splitlines()[-1]
    assert first_set() <= set(" ".join(calls).split())
    assert all((ROOT / word.removeprefix("--ignore=")).exists() for word in first_set())


def test_all_runs_every_file_once(checkout: Path) -> None:
    status, output, calls = run(checkout, "--all")
    assert status == 0 and "extras dev" in output
    assert "bash tests/run.sh --all adds" not in output
    runs = dict.fromkeys((str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")), 0)
    for call in calls:
        words = call.split()
        ignored = {word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")}
        globs = [word.removeprefix("--ignore-glob=") for word in words if word.startswith("--ignore-glob=")]
        for name in (word for word in words if word.startswith("tests/")):
            for path in runs:
                around = {path, *map(str, Path(path).parents)}
                is_left_out = around & ignored or any(fnmatch(path, glob) for glob in globs)
                runs[path] += path == name or (name in around and not is_left_out)
    assert [path for path, times in runs.items() if times != 1] == []


@pytest.mark.parametrize("arguments", [(), ("--all",)])
def test_a_failure_is_shown_and_is_the_status(checkout: Path, arguments: tuple[str, ...]) -> None:
    status, output, _ = run(checkout, *arguments, FAILS="tests/unit/config")
    assert status == 1 and "1 failed" in output and "The first set FAILED" in output


def test_other_arguments_are_those_of_pytest(checkout: Path) -> None:
    assert run(checkout, "tests/unit/config", "-k", "preset")[2] == ["-m pytest tests/unit/config -k preset"]


def test_the_listed_cases_are_of_tests_that_exist() -> None:
    cases = [
        line for line in (ROOT / "tests/more_cases.txt").read_text(encoding="utf-8").splitlines() if line[0] != "#"
    ]
    assert len(cases) == len(set(cases)) > 0
    for case in cases:
        path, _, function = case.partition("[")[0].partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), case


def test_options_after_all_reach_every_pytest(checkout: Path) -> None:
    _, _, calls = run(checkout, "--all", "--all-cases")
    assert calls and all("--all-cases" in call for call in calls)
