"""The report of this machine, where no recipe is native."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_machine_without_a_gpu_trains_emulated(tmp_path: Path) -> None:
    command = [sys.executable, "tools/verify_device.py", "--recipes", "mxfp8", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    text, data = (tmp_path / "report.md").read_text(), json.loads((tmp_path / "report.json").read_text())
    assert text in done.stdout and "| mxfp8 | e4m3 | emulated only |" in text
    assert "Nothing native was compared." in text and "NOT RUN: casts" in text
    assert data["ok"] and 3 < data["steps"][0]["last_loss"] < 7 and data["device"]["native_recipes"] == []


def test_an_unknown_part_is_refused() -> None:
    command = [sys.executable, "tools/verify_device.py", "--parts", "everything"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 64 and "'everything'" in done.stderr
