"""The scales of Transformer Engine's fused operations, with its own Python and nothing compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
ORACLES = Path(os.environ.get("MEGAFP8_ORACLES", TESTS.parent / ".venv" / "oracles"))


@pytest.mark.skipif(not list(ORACLES.glob("transformer_engine-*.whl")), reason=f"no Transformer Engine in {ORACLES}")
def test_scales_of_a_fused_mlp_are_its_linears() -> None:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "MEGAFP8_ORACLES": str(ORACLES)}
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("te_fused_scales.py"))]
    finished = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
