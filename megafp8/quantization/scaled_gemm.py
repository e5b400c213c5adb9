"""GEMMs of quantized operands: of decoded operands on any device, and of FP8 codes on Hopper's tensor cores.

`emulated_gemm` and `accumulate` multiply decoded operands, sum in FP32 and round once. `multiply` takes codes with one
scale for each row and column (rowwise scaling) to torch's scaled GEMM:

    product [M, N] = diag(a_scale) (a [M, K] . b [K, N]) diag(b_scale)

Scales along the summed dimension factor out of the sum, so that the tensor core multiplies codes and its epilogue the
scales. Hopper needs both operands contiguous along the sum: a by rows, b by columns.

Numerics of `multiply`: products are exact. With `is_fast` a sum stays in the tensor core, which keeps about 14 bits of
it; otherwise parts of the sum are added in FP32. Transformer Engine has the same choice, and uses the fast one in fprop
alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor

from megafp8.kernels.cpu_matmul import widened_for_cpu
from megafp8.quantization.quantize import has_kernels
from megafp8.quantization.quantized_tensor import Quantized
from megafp8.recipes import registry
from megafp8.recipes.base import FULL_DIM, OPERANDS_OF, Gemm, LinearRecipe, along_sum
from megafp8.recipes.formats import E5M2


def product_of(a: Optional[Tensor], b: Optional[Tensor]) -> Optional[Tensor]:
    """The product of two factors, where None is 1."""
    if a is None or b is None:
        return a if b is None else b
    return a * b


def rows_of(tensor: Tensor) -> Tensor:
    """[..., K] as [T, K]."""
    return tensor.reshape(-1, tensor.shape[-1])


# --- decoded operands -------------------------------------------------------------------------------------------------


def emulated_gemm(
    a: Tensor, b: Tensor, factor: Optional[Tensor], dtype: torch.dtype, bias: Optional[Tensor] = None
) -> Tensor:
    """factor (a . b) + bias, summed in FP32 and rounded once to `dtype`.

    Args:
        a, b: [M, K] and [K, N], of one dtype: `LinearPlan.gemm_dtype`, or that of high precision.
        factor: FP32 scalar on their device; None is 1.
        bias: [N] or None.
    """
    if a.is_cuda:
        if factor is None and bias is None and a.dtype == dtype:
            return torch.mm(a, b)
        product = torch.mm(a, b) if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)
        return _finish(product, factor, bias, dtype)
    a, b = widened_for_cpu(a, b)
    alpha = 1.0 if factor is None else factor.item()
    if bias is None:  # beta is 0: the first operand is not read
        return torch.addmm(a.new_empty(1), a, b, beta=0, alpha=alpha).to(dtype)
    return torch.addmm(bias.to(a.dtype), a, b, alpha=alpha).to(dtype)


def _finish(product: Tensor, factor: Optional[Tensor], bias: Optional[Tensor], dtype: torch.dtype) -> Tensor:
    """factor x product + bias for an FP32 product on a GPU, rounded once to `dtype`."""
    if factor is None and bias is None:
        return product.to(dtype)
    if has_kernels(product):
        from megafp8.quantization import triton_quantize  # needs Triton

        return triton_quantize.finish_product(product, factor, bias, dtype)
    product = product if factor is None else product.mul_(factor)
    return (product if bias is None else product.add_(bias)).to(dtype)


def accumulate(main_grad: Tensor, a: Tensor, b: Tensor, factor: Optional[Tensor] = None) -> None:
    """main_grad += factor (a . b), summed in FP32 and rounded once to the type of main_grad.

    A CPU's BF16 GEMM has a BF16 result: adding it to an FP32 main_grad would bring a relative error of up to 2^-9 with
    every microbatch. BF16 operands are therefore multiplied as FP32 numbers.

    Args:
        main_grad: [M, N], FP32, BF16 or FP16; changed in place.
        a, b: [M, K] and [K, N], of one dtype.
        factor: FP32 scalar on their device; None is 1.
    """
    if a.is_cuda:
        _accumulate_on_gpu(main_grad, a, b, factor)
        return
    dtype = torch.promote_types(a.dtype, main_grad.dtype)
    is_bf16 = a.dtype == torch.bfloat16
    a, b = widened_for_cpu(a.to(dtype), b.to(dtype))
    if a.dtype != main_grad.dtype:
        main_grad.add_(emulated_gemm(a, b, factor, a.dtype))
        return
    with _allow_bf16_units() if is_bf16 else contextlib.nullcontext():
        main_grad.addmm_(a, b, alpha=1.0 if factor is None else factor.item())


@contextlib.contextmanager
def _allow_bf16_units() -> Iterator[None]:
    """Within, oneDNN may multiply FP32 matrices in the BF16 units of a CPU that has them.

    For operands that are BF16 numbers: rounding them changes nothing, sums and results stay FP32, and the GEMM takes a
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
    """Whether this torch adds a product of BF16 to FP32 in one GEMM; its first versions with `out_dtype` refuse."""
    total, ones = torch.zeros(8, 8, device="cuda"), torch.ones(8, 8, dtype=torch.bfloat16, device="cuda")
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


# --- codes ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def supports_scaled_mm(device: torch.device) -> bool:
    """Whether a GPU is one on which some recipe's codes are multiplied (`Recipe.scaled_mm_capabilities`)."""
    capability = torch.cuda.get_device_capability(device)
    ranges = (limits for recipe in registry.recipes() for limits in recipe.scaled_mm_capabilities)
    return any(since <= capability < end for since, end in ranges)


def multiplies_codes(recipe: LinearRecipe, gemm: Gemm, activation: Tensor) -> bool:
    """Whether a GEMM multiplies its operands' codes; otherwise they are decoded first."""
    if not activation.is_cuda or activation.dtype != torch.bfloat16:
        return False
    rules = [(operand, recipe.rule(operand, gemm)) for operand in dict(OPERANDS_OF)[gemm]]
    if any(rule is None or rule.block != along_sum(FULL_DIM, operand, gemm) for operand, rule in rules):
        return False
    # Hopper has no product of two E5M2 operands.
    is_all_e5m2 = all(rule is not None and rule.format is E5M2 for _, rule in rules)
    return not is_all_e5m2 and supports_scaled_mm(activation.device)


def rows_along_sum(quantized: Quantized) -> tuple[Tensor, Tensor]:
    """(codes [M, K] by rows, scale [M, 1]) of the first operand of fprop and dgrad."""
    return rows_of(quantized.codes).contiguous(), quantized.dequant_scale


def columns_along_sum(quantized: Quantized) -> tuple[Tensor, Tensor]:
    """(codes [K, N] by columns, scale [1, N]) of the second operand of dgrad and wgrad."""
    return rows_of(quantized.codes).t().contiguous().t(), quantized.dequant_scale


def transposed(operand: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """An operand's codes and scales transposed."""
    return operand[0].t(), operand[1].t()


def multiply(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, *, bias: Optional[Tensor] = None,
    is_fast: bool = False,
) -> Tensor:  # fmt: skip
    """The product [M, N] of codes a [M, K] and b [K, N] with their scales, in BF16 or FP32.

    Args:
        a: as `rows_along_sum` returns it; K and N are multiples of 16.
        b: as `columns_along_sum` returns it, or such an operand `transposed`.
        bias: BF16 [N].
        is_fast: sums stay in the tensor core.
    """
    scales = a[1].contiguous(), b[1].contiguous()
    return torch._scaled_mm(a[0], b[0], *scales, bias=bias, out_dtype=dtype, use_fast_accum=is_fast)
