"""Programs that test Transformer Engine's Python code without compiled parts, each in its own process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
ORACLES = Path(os.environ.get("MEGAFP8_ORACLES", TESTS.parent / ".venv" / "oracles"))


@pytest.fixture(scope="module")
def programs() -> Iterator[subprocess.Popen]:
    """The process that runs them."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "MEGAFP8_ORACLES": str(ORACLES)}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("fork_te_programs.py"))]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.mark.skipif(not list(ORACLES.glob("transformer_engine-*.whl")), reason=f"no Transformer Engine in {ORACLES}")
@pytest.mark.parametrize("name", [path.name for path in sorted(Path(__file__).parent.glob("te_*.py"))])
def test_program_finishes(name: str, programs: subprocess.Popen) -> None:
    programs.stdin.write(f"{Path(__file__).with_name(name)}\n")
    programs.stdin.flush()
    status, output = json.loads(programs.stdout.readline())
    assert status == 0, output
