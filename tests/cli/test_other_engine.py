"""`tests/other_engine.sh` with Pythons that only write down how they were called: which Python and files it takes."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Answers what the script asks: the version of megatron-core, its folder, and whether the tests pass.
PYTHON = """#!/usr/bin/env bash
echo "$0 $*" >> {calls}
case "$*" in
  --version) echo "Python 3.x" ;;
  *find_spec*) echo {core} ;;
  *'version("megatron-core")'*) case "${{PYTHONPATH:-}}" in *engines*) echo 0.19.2 ;; *) echo 0.16.1 ;; esac ;;
  *--target*)
    [ -z "${{DOWNLOAD_FAILS:-}}" ] || exit 1
    while [ "$1" != --target ]; do shift; done
    mkdir -p "$2/megatron/core/datasets" && cp {core}/datasets/helpers.cpp "$2/megatron/core/datasets/" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *' -e .[dev]'*) [ -z "${{INSTALL_FAILS:-}}" ] ;;
  *pytest*) exit "${{TESTS_STATUS:-0}}" ;;
  *--dry-run*) exit {dry_run} ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("tests/other_engine.sh", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/setup_venv.sh").write_text('PYTHON="$PWD/.venv/bin/python"\n', encoding="utf-8")
    datasets = tmp_path / "core/datasets"
    datasets.mkdir(parents=True)
    for name in ("helpers.cpp", "helpers_cpp.cpython.so"):
        (datasets / name).touch()
    for name, dry_run in ((".venv/bin/python", 1), ("bin/python3.12", 1), ("bin/python3.13", 1)):
        add_python(tmp_path, name, dry_run)
    return tmp_path


def add_python(checkout: Path, name: str, dry_run: int) -> None:
    path = checkout / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = PYTHON.format(calls=checkout / "calls", core=checkout / "core", dry_run=dry_run)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def run(checkout: Path, **variables: str) -> tuple[int, list[str], list[str]]:
    """Status, output and calls of Pythons."""
    environment = os.environ | {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": ""} | variables
    command = ["bash", "tests/other_engine.sh", "-x"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stderr == "") == (done.returncode in (0, 3))
    output = done.stdout + done.stderr
    return done.returncode, output.splitlines(), (checkout / "calls").read_text().splitlines()


def test_without_a_local_build_of_torch_the_installed_python_takes_its_files(checkout: Path) -> None:
    status, output, calls = run(checkout)
    assert status == 0
    assert output[-1].startswith("NOT TESTED natively: there is no Python 3.12 or 3.13 for which pip")
    (tests,) = [call for call in calls if "-m pytest" in call]
    assert tests.startswith(f"{checkout}/.venv/bin/python -m pytest -p no:cacheprovider -x tests/unit/mcore ")
    paths = [word.removeprefix("--deselect=").partition("::")[0] for word in tests.split()[6:]]
    assert len(paths) > 8 and all((ROOT / path).exists() for path in paths)
    assert (checkout / ".venv/engines/0.19.2-3.12/megatron/core/datasets/helpers_cpp.cpython.so").exists()


def test_the_status_is_that_of_the_tests(checkout: Path) -> None:
    assert run(checkout, TESTS_STATUS="3")[0] == 3


def test_a_python_with_a_local_build_of_torch_is_used(checkout: Path) -> None:
    add_python(checkout, "bin/python3.13", 0)
    status, output, calls = run(checkout)
    assert status == 0 and "NOT TESTED" not in "".join(output)
    native = f"{checkout}/.venv/engines/native/bin/python"
    assert [call for call in calls if "-m pytest" in call][0].startswith(f"{native} -m pytest")
    assert any(call.startswith(native) and call.endswith("-e .[dev] megatron-core==0.16.1") for call in calls)
    assert any("--python-version 3.13" in call for call in calls)
    assert "megatron-core" not in (checkout / ".venv/engines/native/constraints.txt").read_text()
    before = len([call for call in calls if "-m venv" in call])
    assert len([call for call in run(checkout)[2] if "-m venv" in call]) == before == 1


@pytest.mark.parametrize(
    ("variable", "dry_run", "reason"),
    [
        ("DOWNLOAD_FAILS", 1, "its wheel cannot be downloaded"),
        ("INSTALL_FAILS", 0, "it cannot be installed for python3.13"),
    ],
)
def test_what_cannot_be_installed_is_an_error(checkout: Path, variable: str, dry_run: int, reason: str) -> None:
    add_python(checkout, "bin/python3.13", dry_run)
    status, output, calls = run(checkout, **{variable: "1"})
    assert (status, output) == (1, [f"cannot be tested with megatron-core 0.19.2: {reason}"])
    assert not any("-m pytest" in call for call in calls)
    assert not (checkout / ".venv/engines/0.19.2-3.12").exists()
    assert run(checkout)[0] == 0, "the next run tries again"


def test_another_installed_version_is_not_tested(checkout: Path) -> None:
    add_python(checkout, ".venv/bin/python", 1)
    python = checkout / ".venv/bin/python"
    python.write_text(python.read_text().replace("echo 0.16.1", "echo 0.19.2"), encoding="utf-8")
    status, output, calls = run(checkout)
    assert (status, len(output)) == (0, 1)
    assert output[0].startswith("NOT TESTED with megatron-core 0.19.2: 0.19.2 is installed")
    assert not any("-m pytest" in call for call in calls)
