"""Rows of codes times the weights of their experts, against plain products of each expert's rows.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

import interpreter
import pytest
import torch
from interpreter import DEVICE, IS_INTERPRETED

interpreter.skip_without_kernels()

from test_expert_wgrad import EXPERTS, TOKENS, drawn, routed

from megafp8.kernels import expert_product

pytestmark = pytest.mark.usefixtures("exact")
OUTPUTS, WIDTH = 256, 320


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("tile", expert_product.TILES)
@pytest.mark.parametrize("routing", TOKENS)
def test_rows_are_multiplied_by_the_weights_of_their_expert(
    routing: str, tile: expert_product.Tile, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_product, "TILES", (tile, tile))
    rows = routed(TOKENS[routing])
    grad_output = drawn(len(rows.token_of_row), OUTPUTS, rows, 0).to(dtype)
    weights = torch.randn(EXPERTS, WIDTH, OUTPUTS, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    codes = weights.to(torch.float8_e4m3fn)
    scales = torch.rand(2, EXPERTS, generator=torch.Generator().manual_seed(2)).to(DEVICE) + 0.5
    found = expert_product.product(grad_output, scales[0], codes, scales[1], rows)
    assert found.dtype == torch.bfloat16
    ends = [0, *rows.ends.tolist()]
    for expert, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        wanted = grad_output[start:end].float() @ codes[expert].float().t() * scales[:, expert].prod()
        # BF16 has 8 bits. FP8 tensor cores add with 13 bits of fraction.
        bound = 2e-3 if IS_INTERPRETED else 4e-3
        assert (found[start:end].float() - wanted).norm() <= bound * wanted.norm()
