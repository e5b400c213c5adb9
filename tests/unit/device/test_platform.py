"""How a process prepares its device."""

import os
import subprocess
import sys

import pytest

PROBE = """
import os, torch
from megafp8.device.platform import compute_deterministically
compute_deterministically()
print(torch.are_deterministic_algorithms_enabled())
print(os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"], os.environ["NCCL_ALGO"])
"""


@pytest.mark.parametrize(("given", "kept"), [({}, "Ring"), ({"NCCL_ALGO": "Tree"}, "Tree")])
def test_deterministic_mode_sets_what_is_not_set(given: dict, kept: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL", "NVTE", "CUBLAS"))} | given
    said = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True", "0", kept]
