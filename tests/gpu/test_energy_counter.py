"""The energy counter of a GPU's driver, in the records of a run (`--log-energy`)."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from megafp8.device.energy import EnergyCounter

MATRIX = 8192


def test_a_busy_gpu_takes_more_than_an_idle_one() -> None:
    """Watts are between those of an idle GPU and 1.5 times of the largest board."""
    device = torch.device("cuda", torch.cuda.current_device())
    joules, matrix = EnergyCounter(device).joules, torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    started, first = torch.cuda.Event(enable_timing=True), joules()
    ended = torch.cuda.Event(enable_timing=True)
    started.record()
    for _ in range(400):
        matrix @ matrix
    ended.record()
    torch.cuda.synchronize()
    watts = (joules() - first) / (started.elapsed_time(ended) / 1e3)
    assert 150 < watts < 1500, watts
