"""Programs that test Transformer Engine's Python code without compiled parts, each in its own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
ORACLES = Path(os.environ.get("MEGAFP8_ORACLES", TESTS.parent / ".venv" / "oracles"))


@pytest.mark.skipif(not list(ORACLES.glob("transformer_engine-*.whl")), reason=f"no Transformer Engine in {ORACLES}")
@pytest.mark.parametrize("name", [path.name for path in sorted(Path(__file__).parent.glob("te_*.py"))])
def test_program_finishes(name: str) -> None:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "MEGAFP8_ORACLES": str(ORACLES)}
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name(name))]
    finished = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
