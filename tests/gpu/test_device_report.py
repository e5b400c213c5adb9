"""The comparison of this GPU, but for native casts and linears, which `tests/conformance/test_te_live.py` compares."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from requirements import require_transformer_engine

pytestmark = pytest.mark.gpu
require_transformer_engine()

from megafp8.recipes import registry
from megafp8.training.device_verification.comparisons import compare_devices

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("recipe", registry.names())
def test_the_emulation_is_that_of_the_cpu(recipe: str) -> None:
    compared = compare_devices(recipe, registry.get(recipe).default_format, "cuda")
    assert compared.ok, compared


def test_this_gpu_agrees_with_the_emulation(tmp_path: Path) -> None:
    parts = ["--parts", "steps", "speed", "attention"]
    command = [sys.executable, "tools/verify_device.py", *parts, "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    data = json.loads((tmp_path / "report.json").read_text())
    print(done.stdout)
    assert done.returncode == 0 and data["ok"], data["problems"]
    assert data["device"]["native_recipes"] and data["speed"] and len(data["attention"]) == 3
