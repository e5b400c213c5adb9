"""The product of two decoded operands by a factor, with FP32 sums and one rounding, on a CPU or a GPU.

GEMMs of codes with a scale a row and a column, by Hopper's tensor cores (torch's `scaled_mm`).

    product [M, N] = diag(a_scale) (a [M, K] . b [K, N]) diag(b_scale)

Scales along the sum come out of it, so the tensor core multiplies codes and its epilogue the scales. Both operands must
lie along the sum in memory: a by rows, b by columns.

Numerics: products are exact. With `is_fast` all of a sum stays in the tensor core, which keeps about 14 bits of it;
else parts of it are added in FP32. Transformer Engine has the same choice, and takes the fast one in fprop alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor

from megafp8.quantization.quantize import Quantized, has_kernels
from megafp8.recipes.base import OPERANDS_OF, WHOLE, Gemm, LinearRecipe, along_sum
from megafp8.recipes.formats import E5M2


def product_of(a: Optional[Tensor], b: Optional[Tensor]) -> Optional[Tensor]:
    """The product of two factors, None being 1."""
    if a is None or b is None:
        return a if b is None else b
    return a * b


def rows_of(tensor: Tensor) -> Tensor:
    """[..., K] as [T, K]."""
    return tensor.reshape(-1, tensor.shape[-1])


def emulated_gemm(
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
        from megafp8.quantization import triton_quantize  # needs Triton

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
        main_grad.add_(emulated_gemm(a, b, factor, dtype))
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
    product = emulated_gemm(a, b, None, torch.float32)
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


CAPABILITY = (9, 0)
"""The compute capability that this was tried on."""


def multiplies_codes(recipe: LinearRecipe, gemm: Gemm, activation: Tensor) -> bool:
    """Are the codes of this GEMM multiplied as they are? Else they are decoded first."""
    if not activation.is_cuda or activation.dtype != torch.bfloat16:
        return False
    if torch.cuda.get_device_capability(activation.device) != CAPABILITY:
        return False
    rules = [(operand, recipe.rule(operand, gemm)) for operand in dict(OPERANDS_OF)[gemm]]
    has_scales_along_sum = all(rule.block == along_sum(WHOLE, operand, gemm) for operand, rule in rules)
    return has_scales_along_sum and not all(rule.format is E5M2 for _, rule in rules)


def rows_along_sum(quantized: Quantized) -> tuple[Tensor, Tensor]:
    """(codes [M, K] by rows, scale [M, 1]) of the first operand of fprop and dgrad."""
    codes = quantized.codes
    return codes.reshape(-1, codes.shape[-1]).contiguous(), quantized.dequant_scale


def transposed(operand: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """An operand's codes and scales transposed."""
    return operand[0].t(), operand[1].t()


def columns_along_sum(quantized: Quantized) -> tuple[Tensor, Tensor]:
    """(codes [K, N] by columns, scale [1, N]) of the second operand of dgrad and wgrad."""
    codes = quantized.codes.reshape(-1, quantized.codes.shape[-1])
    return codes.t().contiguous().t(), quantized.dequant_scale


def multiply(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, *, bias: Optional[Tensor] = None,
    is_fast: bool = False,
) -> Tensor:  # fmt: skip
    """The product [M, N] of codes a [M, K] and b [K, N] with their scales, in BF16 or FP32.

    Args:
        a: as `rows_along_sum` gives it; K and N are multiples of 16.
        b: as `columns_along_sum` gives it, or such an operand `transposed`.
        bias: BF16 [N].
        is_fast: sums stay in the tensor core.
    """
    scales = a[1].contiguous(), b[1].contiguous()
    return torch._scaled_mm(a[0], b[0], *scales, bias=bias, out_dtype=dtype, use_fast_accum=is_fast)
