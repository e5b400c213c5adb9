"""Products with the transpose, of which half is computed, against torch.

On a machine without a GPU: `pip install triton`, then `TRITON_INTERPRET=1 python -m pytest tests/unit/kernels`.
"""

from __future__ import annotations

from typing import Any, Optional

import interpreter
import pytest
import torch
from interpreter import DEVICE
from torch import Tensor

interpreter.skip_without_kernels()

from megafp8.config.optimizers import polynomials
from megafp8.config.schema import OptimizerConfig
from megafp8.kernels import symmetric
from megafp8.kernels.symmetric import multiply_by_transpose, pays
from megafp8.optimizer import muon

pytestmark = pytest.mark.usefixtures("exact")


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(DEVICE)


def expected(a: Tensor, added: Optional[Tensor], alpha: float, beta: float) -> Tensor:
    """In FP64."""
    result = alpha * a.double() @ a.double().mT
    return result if added is None else result + beta * added.double()


# Rows and columns that 128 and 64 do not divide, one tile, and six tiles of a matrix in a stack.
@pytest.mark.parametrize("shape", [(256, 128), (200, 72), (8, 328), (2, 328, 40)])
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_product_is_rounded_once(shape: tuple[int, ...], is_turned: bool) -> None:
    a = drawn(*shape[:-2], shape[-1], shape[-2]).mT if is_turned else drawn(*shape)
    half = drawn(*shape[:-1], shape[-2])
    for added, alpha, beta in ((None, 1.0, 0.0), (half + half.mT, 2.0315, -4.775)):
        wanted = expected(a, added, alpha, beta)
        found = multiply_by_transpose(a, added, alpha=alpha, beta=beta)
        assert found.dtype == torch.bfloat16 and found.shape == wanted.shape and torch.equal(found, found.mT)
        # Half a spacing of BF16, and sums in FP32, whose terms may cancel.
        bound = 2.0**-8 * wanted.abs() + 1e-5 * wanted.abs().max()
        assert ((found.double() - wanted).abs() <= bound).all()


def test_large_matrices_of_bf16_pay() -> None:
    def of(*shape: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return pays(torch.empty(shape, dtype=dtype, device="meta"))

    assert of(4096, 14336) and of(4096, 4096) and of(64, 1024, 2048)
    assert not of(2048, 8192) and not of(4096, 4100) and not of(4096, 4096, dtype=torch.float32)


def test_newton_schulz_uses_it_and_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """For both products of each step, here of a matrix with more rows than columns, which is turned."""
    matrix, steps, seen = drawn(320, 136).float(), polynomials(OptimizerConfig()), []
    plain = muon.newton_schulz(matrix, steps, "medium")

    def multiply(a: Tensor, *others: Any, **options: float) -> Tensor:
        seen.append(tuple(a.shape))
        return multiply_by_transpose(a, *others, **options)

    monkeypatch.setattr(symmetric, "multiply_by_transpose", multiply)
    monkeypatch.setattr(symmetric, "LEAST_TILES", 1)
    monkeypatch.setattr(muon, "has_kernels", lambda tensor: True)
    found = muon.newton_schulz(matrix, steps, "medium")
    assert seen == [(136, 320), (136, 136)] * len(steps)
    assert (found - plain).norm() < 1e-2 * plain.norm()  # BF16 in five steps
    seen.clear()
    muon.newton_schulz(matrix, steps, "highest")
    assert not seen
