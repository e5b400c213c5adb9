"""BF16 operands on CPUs with and without instructions for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megafp8.kernels import cpu_matmul
from megafp8.mcore import cpu_patches
from megafp8.models.attention import CausalAttention
from megafp8.optimizer.muon import newton_schulz
from megafp8.quantization import scaled_gemm

CPUS = {"slow in BF16": False, "fast in BF16": True}


@pytest.fixture(params=CPUS)
def is_fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(cpu_matmul, "multiplies_bf16", lambda: CPUS[request.param])
    return CPUS[request.param]


@pytest.fixture
def patched(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """`torch.matmul` as the patch leaves it on such a CPU."""
    monkeypatch.setattr(cpu_patches, "multiplies_bf16", lambda: is_fast)
    monkeypatch.setattr(torch, "matmul", torch._C._VariableFunctions.matmul)
    monkeypatch.setattr(torch.Tensor, "matmul", torch._C.TensorBase.matmul)
    cpu_patches.patch_bf16_matmul()
    yield is_fast


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(48, 96, generator=generator).to(dtype), torch.randn(96, 32, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_only_bf16_is_multiplied_as_fp32_and_only_where_it_is_slow(dtype: torch.dtype, is_fast: bool) -> None:
    a, b = operands(dtype)
    expected = torch.float32 if dtype == torch.bfloat16 and not is_fast else dtype
    assert [each.dtype for each in cpu_matmul.widened_for_cpu(a, b)] == [expected, expected]


def test_emulated_products_are_rounded_once(is_fast: bool) -> None:
    a, b = operands(torch.bfloat16)
    product = scaled_gemm.emulated_gemm(a, b, torch.tensor(0.75), torch.bfloat16)
    if not is_fast:
        assert torch.equal(product, (0.75 * (a.float() @ b.float())).bfloat16())
    torch.testing.assert_close(product.float(), 0.75 * (a.double() @ b.double()).float(), rtol=2**-8, atol=2**-8)


def test_matmul_and_its_gradients_are_those_of_fp32_rounded(patched: bool) -> None:
    a, b = (each.requires_grad_() for each in operands(torch.bfloat16))
    exact = [each.detach().float().requires_grad_() for each in (a, b)]
    expected = torch.mm(*exact)
    expected.sum().backward()
    for product in (torch.matmul(a, b), a.matmul(b)):
        assert product.dtype == torch.bfloat16
        if not patched:
            assert torch.equal(product, expected.bfloat16())
            a.grad = b.grad = None
            product.sum().backward()
            assert torch.equal(a.grad, exact[0].grad.bfloat16()) and torch.equal(b.grad, exact[1].grad.bfloat16())


def test_other_calls_of_matmul_are_those_of_torch(patched: bool) -> None:
    (a, b), (wide, other) = operands(torch.bfloat16), operands(torch.float32)
    total = torch.empty(48, 32, dtype=torch.bfloat16)
    assert torch.matmul(a, b, out=total) is total
    for product in (torch.matmul(a, other=b), torch.matmul(input=a, other=b), a.matmul(other=b), a @ b):
        assert product.dtype == torch.bfloat16
    assert torch.equal(torch.matmul(wide, other), wide @ other)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.matmul(a, other)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.matmul(wide, other).dtype == torch.bfloat16
    torch.fx.symbolic_trace(lambda x: torch.matmul(x, x))


@pytest.mark.parametrize("main_dtype", [torch.bfloat16, torch.float32])
def test_products_are_added_to_gradients_of_any_type(main_dtype: torch.dtype, is_fast: bool) -> None:
    (a, b), main_grad = operands(torch.bfloat16), torch.ones(48, 32, dtype=main_dtype)
    scaled_gemm.accumulate(main_grad, a, b, torch.tensor(0.5))
    expected = (1 + 0.5 * (a.double() @ b.double())).to(main_dtype)
    torch.testing.assert_close(main_grad, expected, rtol=2**-7, atol=2**-7)


def test_orthogonal_updates_are_alike(is_fast: bool) -> None:
    matrix, steps = operands(torch.float32)[0], (((3.4445, -4.775, 2.0315),) * 5)
    medium, highest = (newton_schulz(matrix, steps, precision) for precision in ("medium", "highest"))
    torch.testing.assert_close(medium, highest, rtol=0.05, atol=0.05)


def test_attention_has_the_dtype_of_its_query(is_fast: bool) -> None:
    query, key, value = (each.unsqueeze(1) for each in torch.randn(3, 2, 8, 16).bfloat16())
    attention = CausalAttention.__new__(CausalAttention)
    torch.nn.Module.__init__(attention)
    attention.is_unfused, attention.logit_softcapping, attention.softmax_type = False, None, "vanilla"
    attention.softmax_scale = 0.25
    output = attention.attend([query, key, value], None, 0.0, False)
    exact = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=True, scale=0.25
    )
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), exact, rtol=2**-7, atol=2**-7)
