"""Signal and noise by a kernel, against torch operations.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/telemetry`.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or Triton and TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from megafp8.telemetry.tensor_sums import compare  # noqa: E402
from megafp8.telemetry.triton_sums import compare_whole  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(1, 1), (3, 32), (70, 96), (129, 45)])
@pytest.mark.parametrize("factor", [None, 0.25])
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 0.0])
def test_sums_are_those_of_torch(shape: tuple[int, int], factor: float | None, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(*shape, generator=generator) * scale).bfloat16()
    noise = torch.randn(*shape, generator=generator) * (torch.rand(*shape, generator=generator) < 0.5)
    decoded = (values.float() * (1 + 0.1 * noise)) / (factor or 1.0)
    values[shape[0] // 2] = 0.0
    decoded[shape[0] // 2] = 0.0
    amax = values.abs().amax().float()
    expected = compare(values.float(), decoded * (factor or 1.0), amax)
    on = None if factor is None else torch.tensor(factor, device=DEVICE)
    found = compare_whole(values.to(DEVICE), decoded.to(DEVICE), on, amax.to(DEVICE))
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-30), name


def test_what_is_not_finite_has_no_part() -> None:
    values = torch.ones(4, 64).bfloat16()
    decoded = torch.full((4, 64), 1.5)
    amax = torch.ones(())
    values[0, 3], values[2, 40], values[3, 0] = torch.inf, -torch.inf, torch.nan
    found = compare_whole(values.to(DEVICE), decoded.to(DEVICE), None, amax.to(DEVICE))
    assert found["signal"].item() == 4 * 64 - 3
    assert found["noise"].item() == 0.25 * (4 * 64 - 3)
    assert found["local_runs"].item() == 8
