"""Products that are added to a gradient buffer."""

import pytest
import torch

from megafp8.quantization.scaled_gemm import accumulate

NUM_MICROBATCHES = 64
SHAPE = OUTPUTS, TOKENS, INPUTS = 24, 96, 40  # more than oneDNN needs to handle an FP32 product


def operands(dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, T], a transpose as in a weight gradient, and [T, K]."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(TOKENS, OUTPUTS, generator=generator).to(dtype).t()
    return a, torch.randn(TOKENS, INPUTS, generator=generator).to(dtype)


@pytest.mark.parametrize("factor", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_are_summed_in_fp32(dtype: torch.dtype, factor: float | None) -> None:
    """Rounded to BF16 one by one, they would be 1.7e-3 off."""
    main_grad, expected = torch.zeros(OUTPUTS, INPUTS), torch.zeros(OUTPUTS, INPUTS, dtype=torch.float64)
    scalar = None if factor is None else torch.tensor(factor)
    for microbatch in range(NUM_MICROBATCHES):
        a, b = operands(dtype, microbatch)
        accumulate(main_grad, a, b, scalar)
        expected += (1.0 if scalar is None else scalar.double()) * (a.double() @ b.double())
    assert (main_grad - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_bf16_buffer_is_rounded_once_a_product(dtype: torch.dtype) -> None:
    main_grad = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)).bfloat16()
    a, b = operands(dtype, 2)
    expected = (main_grad.double() + a.double() @ b.double()).bfloat16()
    accumulate(main_grad, a, b)
    assert main_grad.dtype == torch.bfloat16
    assert (main_grad == expected).double().mean() > 0.99


def test_other_products_keep_their_precision() -> None:
    """Only operands that are exact in BF16 may be multiplied in BF16."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):  # noqa: ANN001, ANN206
            if function is torch.Tensor.addmm_:
                seen.append(torch.backends.mkldnn.matmul.fp32_precision)
            return super().__torch_function__(function, types, args, kwargs or {})

    for dtype in (torch.bfloat16, torch.float32):
        accumulate(torch.zeros(OUTPUTS, INPUTS).as_subclass(Watched), *operands(dtype, 3))
    assert seen == ["bf16", before]
    assert torch.backends.mkldnn.matmul.fp32_precision == before
