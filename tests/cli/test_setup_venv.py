"""`tools/setup_venv.sh` shows a line for each step, and nothing where nothing is to be done."""

import os
import pty
import shutil
import subprocess
from pathlib import Path
from typing import Optional

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = ("torch (the largest download)", "megafp8 and the packages that it needs", "the extras dev")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with a `.venv` whose Python only writes down how it was called."""
    for name in ("tools/setup_venv.sh", "setup.py", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/usr/bin/env bash\necho "$*" >> {tmp_path}/calls\n', encoding="utf-8")
    python.chmod(0o755)
    return tmp_path


def set_up(checkout: Path, **options: object) -> subprocess.CompletedProcess:
    # Without nvidia-smi and without a Python that has everything.
    (checkout / "bin").mkdir(exist_ok=True)
    for name in ("python3", "nvidia-smi"):
        (checkout / "bin" / name).write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
        (checkout / "bin" / name).chmod(0o755)
    environment = os.environ | {"MEGAFP8_EXTRAS": "dev", "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", "-euc", ". tools/setup_venv.sh"]
    return subprocess.run(command, cwd=checkout, env=environment, text=True, check=True, timeout=60, **options)


def test_every_step_is_a_line_and_a_second_start_is_silent(checkout: Path) -> None:
    first = set_up(checkout, capture_output=True).stdout.splitlines()
    assert [line for line in first if line.startswith("installing")] == [f"installing {step}" for step in STEPS]
    assert len([line for line in first if line.startswith("installed")]) == len(STEPS)
    calls = (checkout / "calls").read_text().splitlines()
    assert len(calls) == len(STEPS) and all("--quiet" in call for call in calls)
    again = set_up(checkout, capture_output=True)
    assert again.stdout == again.stderr == ""
    assert (checkout / "calls").read_text().splitlines() == calls


def test_on_a_terminal_pip_shows_its_own_progress(checkout: Path) -> None:
    reader, terminal = pty.openpty()
    set_up(checkout, stdout=terminal)
    os.close(terminal)
    assert b"installing torch" in os.read(reader, 10_000)
    os.close(reader)
    assert "--quiet" not in (checkout / "calls").read_text()


@pytest.mark.parametrize("supported", ["python3.13", "python3.12", None])
def test_a_supported_python_makes_the_environment(checkout: Path, supported: Optional[str]) -> None:
    """The version is asked of the Python itself: a supported one exits with 0."""
    shutil.rmtree(checkout / ".venv")
    (checkout / "bin").mkdir()
    for name in ("python3", *(f"python3.{minor}" for minor in range(9, 15))):
        path = checkout / "bin" / name
        path.write_text(f"#!/bin/sh\n[ $1 = -c ] || echo {name} $*\nexit {int(name != supported)}\n", encoding="utf-8")
        path.chmod(0o755)
    environment = os.environ | {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", "-c", ". tools/setup_venv.sh"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60)
    if supported is None:
        assert "megafp8 needs Python 3.11 to 3.13 with venv" in done.stderr
    else:
        assert f"making .venv with {supported}\n{supported} -m venv {checkout}/.venv" in done.stdout
