"""The product of two decoded operands by a factor, with FP32 sums and one rounding, on a CPU or a GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor

from megafp8.fp8.quantize import has_kernels


def product_of(a: Optional[Tensor], b: Optional[Tensor]) -> Optional[Tensor]:
    """The product of two factors, None being 1."""
    if a is None or b is None:
        return a if b is None else b
    return a * b


def rows_of(tensor: Tensor) -> Tensor:
    """[..., K] as [T, K]."""
    return tensor.reshape(-1, tensor.shape[-1])


def scaled_gemm(
    a: Tensor, b: Tensor, factor: Optional[Tensor], dtype: torch.dtype, bias: Optional[Tensor] = None
) -> Tensor:
    """factor (a . b) + bias, summed in FP32 and rounded once to `dtype`.

    Args:
        a, b: [M, K] and [K, N], in `LinearPlan.gemm_dtype`.
        factor: FP32 scalar on their device; None is 1.
        bias: [N] or None.
    """
    if a.is_cuda:
        if factor is None and bias is None and a.dtype == dtype:
            return torch.mm(a, b)
        product = torch.mm(a, b) if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)
        return _finish(product, factor, bias, dtype)
    alpha = 1.0 if factor is None else factor.item()
    if bias is None:  # beta 0: the first operand is not read
        return torch.addmm(a.new_empty(1), a, b, beta=0, alpha=alpha).to(dtype)
    return torch.addmm(bias.to(a.dtype), a, b, alpha=alpha).to(dtype)


def _finish(product: Tensor, factor: Optional[Tensor], bias: Optional[Tensor], dtype: torch.dtype) -> Tensor:
    """factor x product + bias of an FP32 product on a GPU, rounded once to `dtype`."""
    if factor is None and bias is None:
        return product.to(dtype)
    if has_kernels(product):
        from megafp8.fp8 import triton_quantize  # needs Triton

        return triton_quantize.finish_product(product, factor, bias, dtype)
    product = product if factor is None else product.mul_(factor)
    return (product if bias is None else product.add_(bias)).to(dtype)


def accumulate(main_grad: Tensor, a: Tensor, b: Tensor, factor: Optional[Tensor] = None) -> None:
    """main_grad += factor (a . b), summed in FP32 and rounded once, to the type of main_grad.

    A BF16 GEMM of a CPU has a BF16 result: added to an FP32 main_grad it would bring a relative error of up to 2^-9
    with every microbatch. BF16 operands are therefore multiplied as FP32 numbers.

    Args:
        main_grad: [M, N], FP32, BF16 or FP16; changed in place.
        a, b: [M, K] and [K, N], of one type.
        factor: FP32 scalar on their device; None is 1.
    """
    if a.is_cuda:
        _accumulate_on_gpu(main_grad, a, b, factor)
        return
    dtype = torch.promote_types(a.dtype, main_grad.dtype)
    is_bf16 = a.dtype == torch.bfloat16
    a, b = a.to(dtype), b.to(dtype)
    if dtype != main_grad.dtype:
        main_grad.add_(scaled_gemm(a, b, factor, dtype))
        return
    with _bf16_units() if is_bf16 else contextlib.nullcontext():
        main_grad.addmm_(a, b, alpha=1.0 if factor is None else factor.item())


@contextlib.contextmanager
def _bf16_units() -> Iterator[None]:
    """Within, oneDNN may multiply FP32 matrices in the BF16 units of a CPU that has them.

    For operands that are BF16 numbers: rounding them changes nothing, sums and results stay FP32, and it takes a
    quarter to a half of the time.
    """
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _accumulate_on_gpu(main_grad: Tensor, a: Tensor, b: Tensor, factor: Optional[Tensor]) -> None:
    if factor is None and main_grad.dtype == torch.float32 and a.dtype != torch.float32 and _addmm_accumulates():
        torch.addmm(main_grad, a, b, out_dtype=torch.float32, out=main_grad)
        return
    product = scaled_gemm(a, b, None, torch.float32)
    if factor is None:
        main_grad.add_(product)
    elif main_grad.dtype == torch.float32:
        main_grad.addcmul_(product, factor)
    else:
        main_grad.add_(product.mul_(factor))


@functools.lru_cache(maxsize=1)
def _addmm_accumulates() -> bool:
    """Does this torch add a product of BF16 to FP32 in one GEMM? Its first versions with `out_dtype` refuse to."""
    total, ones = torch.zeros(8, 8, device="cuda"), torch.ones(8, 8, dtype=torch.bfloat16, device="cuda")
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True
