"""The doctor as a user runs it, here and where packages are hidden or broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, flags: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *flags, str(ROOT / "tools/doctor.py"), *arguments],
        capture_output=True, text=True, timeout=120, cwd=ROOT, env=os.environ | environment,
    )  # fmt: skip


def test_this_machine_can_train() -> None:
    """It runs these tests."""
    result = run("--json")
    assert result.returncode == 0, result.stdout + result.stderr
    data = json.loads(result.stdout)
    assert data["can_train"] and set(data["recipes"].values()) <= {"native", "emulated"}
    assert {entry["level"] for entry in data["findings"]} <= {"ok", "warning"}


def test_without_any_package_all_problems_are_reported_together(tmp_path: Path) -> None:
    """`python -S` hides site-packages."""
    result = run("--folder", str(tmp_path), flags=("-S",), PYTHONPATH="")
    assert result.returncode == 64, result.stdout + result.stderr
    told = re.sub(" +", " ", result.stdout)
    for problem in ("error torch is not installed", "error megatron-core is not", "libraries not installed: numpy"):
        assert problem in told
    assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.parametrize("fault", ["raise ImportError('libcudart.so.13: cannot open')", "import os; os._exit(11)"])
def test_a_broken_torch_is_a_finding(fault: str, tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(fault, encoding="utf-8")
    result = run("--json", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert result.returncode == 64
    data = json.loads(result.stdout)
    (entry,) = [entry for entry in data["findings"] if entry["level"] == "error"]
    assert entry["check"] == "torch" and "cannot be imported" in entry["text"]
    assert entry["mend"] == "pip install --force-reinstall torch"
    assert set(data["recipes"].values()) == {"not available: see above"}
