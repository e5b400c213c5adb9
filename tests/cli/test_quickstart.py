"""The quickstart from end to end with a few steps: it finishes, and a second start does nothing."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from documented_commands import lay_out
from forked_python import forked_python

ROOT = Path(__file__).resolve().parents[2]


def run_quickstart(root: Path, out: Path, environment: Mapping[str, str]) -> str:
    """The standard output of one start.

    Args:
        root: the project's folder.
    """
    done = subprocess.run(
        ["bash", str(root / "examples" / "quickstart.sh"), str(out)],
        env={**environment, "STEPS": "4"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv").exists(), reason="sets up .venv: tests/run.sh has done so")
def test_quickstart_finishes_and_reuses_finished_runs(tmp_path: Path) -> None:
    """The first start is a user's; in the second one `python` forks."""
    out = tmp_path / "quick"
    first = run_quickstart(ROOT, out, os.environ)
    for name in ("comparison/loss_curves.png", "comparison/comparison.md", "sample.txt", "fp8/tensorboard"):
        assert (out / name).exists(), name
    assert "validation loss" in first and "| fp8 hybrid tensorwise" in first
    # As if the second run had been killed: it has to resume that one, and that one only.
    (out / "fp8" / "done").unlink()
    shutil.rmtree(out / "comparison")
    (tmp_path / "again").mkdir()
    lay_out(tmp_path / "again")
    with tempfile.TemporaryDirectory(prefix="python_") as name, forked_python(Path(name)) as environment:
        second = run_quickstart(tmp_path / "again", out, environment)
    assert "baseline is already trained" in second
    assert "loaded" in second and "step 1/4" not in second
    assert (out / "comparison" / "loss_curves.png").exists()
